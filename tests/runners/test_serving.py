"""Serving through captured graphs: both runners, random traffic, tokens and logits as in eager."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from runner_helpers import make_prompts
from runtime_helpers import captured_sizes, live_bytes, the_owner
from serving import BUCKETS, CONFIG, SETUPS, Served, Traffic

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.graph.partitioned import InputRole
from dsv4_compile.models.deepseek_v4 import StepState
from dsv4_compile.runners.step_inputs import PersistentInputs
from dsv4_compile.runtime.program.cache import ADDRESS_SETS

LONG_CONTEXT = 4 * CONFIG.index_topk  # above it the indexer selects


@pytest.mark.sampled(5)
@pytest.mark.parametrize("setup", SETUPS)
def test_random_traffic_equals_eager(setup: str) -> None:
    served = Served(setup)
    traffic = Traffic(served, seed=1)
    lengths = set()
    with counters.expect(graphs_compiled=1, recaptures=0):
        for _ in range(45):
            lengths |= {end for _, _, end in traffic.step().scheduled}
    visited = served.models[0].sizes
    often = {size for size, times in Counter(visited).items() if times > 1}
    assert len(often) >= 4
    assert sum(a != b for a, b in pairwise(visited)) > 15  # in random order
    assert min(lengths) < LONG_CONTEXT < max(lengths)
    assert captured_sizes() == sorted(often)
    assert counters.uncaptured_calls == len(set(visited))
    assert counters.replays == len(visited) - len(set(visited))
    served.compare_caches()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setup", ["v1 wide", "v1 minimal", "v2 narrow"])
def test_long_contexts_after_captures_with_short_ones(setup: str) -> None:
    """Every bucket is captured while nothing is above the limit of the top-k, then replayed far above it."""
    served = Served(setup)
    for length in (2, 3, 7, 12, 20) * 2:
        served.add_request(make_prompts(length)[0], 1)
        served.finish()
    assert captured_sizes() == sorted(BUCKETS)
    with counters.expect(captures=0, uncaptured_calls=0):
        for prompt in make_prompts(200, 31, 130):
            served.add_request(prompt, 6)
        served.finish()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setup", ["v1 wide", "v1 minimal", "v2 narrow"])
def test_generate_equals_eager_token_for_token(setup: str) -> None:
    served = Served(setup)
    prompts = make_prompts(3, 60, 1, 29, 128, 5)
    assert served.runners[0].generate(prompts, 20) == served.runners[1].generate(prompts, 20)
    served.compare_caches()
    assert counters.replays > 4 * len(BUCKETS)


def test_unpadded_steps_are_captured_by_their_own_sizes() -> None:
    served = Served("v2 narrow", buckets=None)
    for _ in range(2):
        for prompt in make_prompts(3, 17, 5):
            served.add_request(prompt, 6)
        served.finish()
    assert {25, 3} <= set(captured_sizes())


@pytest.mark.exhaustive
def test_bfloat16_stack() -> None:
    served = Served("v2 narrow", torch.bfloat16)
    traffic = Traffic(served, seed=2)
    for _ in range(30):
        traffic.step()
    assert counters.replays > 10


# captured ahead of time


@pytest.mark.exhaustive
@pytest.mark.parametrize("setup", ["v1 wide", "v1 minimal", "v2 narrow"])
def test_capture_ahead_leaves_caches_alone_and_later_steps_replay(setup: str) -> None:
    served = Served(setup)
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(*(model.buffers() for model in served.models), strict=True):
        if ours.is_floating_point():
            theirs.copy_(ours.copy_(torch.randn(ours.shape, generator=generator)))
    before = torch.get_rng_state()
    with counters.expect(captures=len(BUCKETS), uncaptured_calls=len(BUCKETS)):
        dsv4_compile.capture(served.compiled, served.padding_inputs, BUCKETS, progress=False)
    served.compare_caches()
    assert torch.equal(torch.get_rng_state(), before)
    traffic = Traffic(served, seed=3)
    with counters.expect(graphs_compiled=0, captures=0, recaptures=0, uncaptured_calls=0, replays=20):
        for _ in range(20):
            traffic.step()
    served.compare_caches()


def test_capture_ahead_with_live_requests_disturbs_none() -> None:
    """Dummy tokens with slots of their own, NaN in place of everything that a warm-up may write."""
    served = Served("v2 narrow")
    traffic = Traffic(served, seed=4)
    for _ in range(15):
        traffic.step()

    def dummies(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, StepState]:
        ids, positions, step = served.padding_inputs(num_tokens)
        step.swa_slot_mapping.copy_(torch.arange(num_tokens))  # slots that are in use
        step.c4_state_slot_mapping.copy_(torch.arange(num_tokens))
        step.token_to_req.zero_()
        return ids, positions, step

    dsv4_compile.capture(served.compiled, dummies, (24, 12), progress=False)
    served.compare_caches()
    for _ in range(15):
        traffic.step()
    served.finish()


# step state that moves


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("setup", "role"),
    [
        ("v2 narrow", InputRole.STATIC),  # persistent buffers, read where they are
        ("v1 copied in", InputRole.COPIED_IN),  # new tensors, copied in
        ("v1 wide", InputRole.DIRECT),  # new tensors that only eager ops read
    ],
)
def test_how_step_state_is_reached(setup: str, role: InputRole) -> None:
    served = Served(setup)
    served.add_request(make_prompts(5)[0], 1)
    served.finish()
    owner = the_owner()
    roles = {i.name: owner._roles[i.node] for i in owner._graph.traced.inputs}
    assert roles["step.swa_slot_mapping"] is role


def test_step_state_that_moves_is_noticed_and_captured_again() -> None:
    served = Served("v2 narrow")
    served.add_request(make_prompts(9)[0], 40)
    for _ in range(6):
        served.step()
    for _ in range(6):
        runner = served.runner
        runner._inputs = PersistentInputs(runner._builder.build(()), 48, runner._caches.device)
        with counters.expect(captures=1, recaptures=1, uncaptured_calls=0, replays=4):
            for _ in range(4):
                served.step()
    assert captured_sizes().count(2) == ADDRESS_SETS  # and no more, ever


@pytest.mark.exhaustive
def test_one_buffer_of_the_step_state_that_moves_is_enough() -> None:
    served = Served("v2 narrow")
    served.add_request(make_prompts(9)[0], 40)
    for _ in range(6):
        served.step()
    buffers = served.runner._inputs._buffers
    for name in ("swa_block_table", "c4_slot_mapping", "token_to_req"):
        buffers[name] = buffers[name].clone()
        with counters.expect(recaptures=1, uncaptured_calls=0):
            for _ in range(3):
                served.step()


@pytest.mark.exhaustive
def test_second_runner_on_the_same_model_brings_caches_of_its_own() -> None:
    served = Served("v2 narrow")
    held = []
    for _ in range(4):
        for prompt in make_prompts(40, 3):
            served.add_request(prompt, 5)
        served.finish()
        served.forget()
        held.append(live_bytes())
        served.renew_runners()
    assert held[1:] == held[1:2] * 3
    assert counters.recaptures > 0


@pytest.mark.exhaustive
def test_weights_loaded_between_steps() -> None:
    served = Served("v2 narrow")
    traffic = Traffic(served, seed=6)
    for assign in (False, True):
        for _ in range(10):
            traffic.step()
        state = {name: torch.randn_like(value) * 0.2 for name, value in served.stack.state_dict().items()}
        for model in (served.stack, served.models[1].model):
            model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
    for _ in range(10):
        traffic.step()


def test_step_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception from inside of a replay leaves requests, caches and captures in order."""
    served = Served("v2 narrow")
    served.add_request(make_prompts(30)[0], 12)
    for _ in range(5):
        served.step()
    forward_mqa = importlib.import_module("dsv4_compile.ops.forward_mqa")
    for layer in range(3):
        countdown = iter(range(layer, -1, -1))

        def attend(*args: object, countdown: Iterator[int] = countdown, attend: Any = forward_mqa._attend) -> Any:
            if next(countdown) == 0:
                raise KeyError("on purpose")
            return attend(*args)

        monkeypatch.setattr(forward_mqa, "_attend", attend)
        with pytest.raises(KeyError, match="on purpose"):
            served.runner.step()
        monkeypatch.undo()
        with counters.expect(replays=1, captures=0, uncaptured_calls=0):
            served.step()
    served.compare_caches()


# a long run


@pytest.mark.exhaustive
def test_soak() -> None:
    """Hundreds of steps over 8 buckets: every logit equal, no byte more at the end."""
    steps = 500
    buckets = (2, 4, 6, 8, 12, 20, 32, 48)
    served = Served("v2 narrow", buckets=buckets, max_num_reqs=6)
    dsv4_compile.capture(served.compiled, served.padding_inputs, buckets, progress=False)
    traffic = Traffic(served, seed=7)
    held = []
    with counters.expect(captures=0, recaptures=0, uncaptured_calls=0, replays=steps):
        for index in range(steps):
            traffic.step()
            if (index + 1) % (steps // 5) == 0 or index + 1 == steps // 10:
                served.forget()
                held.append(live_bytes())
    assert held == held[:1] * 6
    assert set(served.models[0].sizes) == set(buckets)
    served.compare_caches()
