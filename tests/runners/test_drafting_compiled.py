"""Model and drafter compiled, captured in one pool with one warm-up: every step replays, tokens are as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafting import DraftingStack, drafting_config
from runner_helpers import assert_all_blocks_free, make_prompts
from runtime_helpers import compile_host, owners
from serving import SETUPS

import dsv4_compile
from dsv4_compile import MemoryPool, counters
from dsv4_compile.runners import ModelRunner

LIMITS = {"max_num_reqs": 4, "max_num_batched_tokens": 48, "max_model_len": 200}
BUCKETS = (2, 4, 6, 12, 48)
REQUESTS = list(zip(make_prompts(100, 3, 1, 29, 60, 5), (20, 9, 25, 12, 30, 1), strict=True))


@pytest.fixture(scope="module")
def stack() -> DraftingStack:
    return DraftingStack(drafting_config(index_topk=7))


@pytest.fixture(scope="module")
def expected(stack: DraftingStack) -> list[list[int]]:
    """Answers of the eager model without drafts."""
    return serve(SETUPS["v1 wide"][0](stack, stack.config, **LIMITS))[0]


def serve(runner: ModelRunner) -> tuple[list[list[int]], int]:
    """Answers of `REQUESTS`, which join one by one, and how many steps that took."""
    arrivals, ids, answers, steps = list(REQUESTS), [], {}, 0
    while arrivals or runner.num_active:
        if arrivals:
            ids.append(runner.add_request(*arrivals.pop(0)))
        answers.update(runner.step().finished)
        steps += 1
    assert_all_blocks_free(runner)
    return [answers[request] for request in ids], steps


class Counted:
    """A drafter that counts its calls."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.calls = drafter, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.drafter(*arguments)


@pytest.mark.sampled(37)
@pytest.mark.parametrize("count", [2, 1])
@pytest.mark.parametrize("options", [{}, {"num_blocks": {"swa": 6}}], ids=["", "preempted"])
@pytest.mark.parametrize("setup", SETUPS)
def test_every_step_replays_and_tokens_are_those_without_drafts(
    stack: DraftingStack, expected: list[list[int]], setup: str, options: dict[str, Any], count: int
) -> None:
    runner_type, compiler_options = SETUPS[setup]
    pool = MemoryPool()
    model, block = (
        compile_host(module, pool=pool, max_tokens=48, **compiler_options) for module in (stack, stack.drafter)
    )
    drafter = Counted(block)
    runner = runner_type(
        model,
        stack.config,
        attention=stack,
        drafter=drafter,
        num_draft_tokens=count,
        buckets=BUCKETS,
        **LIMITS,
        **options,
    )
    with counters.expect(graphs_compiled=2, captures=2 * len(BUCKETS), uncaptured_calls=2 * len(BUCKETS)):
        dsv4_compile.capture(runner.run_padding, lambda size: (size,), BUCKETS, progress=False)
    drafter.calls, before = 0, counters.snapshot()
    with counters.expect(graphs_compiled=0, captures=0, recaptures=0, uncaptured_calls=0, traced_graph_calls=0):
        answers, steps = serve(runner)
    assert answers == expected
    assert counters.replays - before["replays"] == steps + drafter.calls
    counts = runner.draft_counts
    assert 0 < counts.accepted < counts.drafted
    assert len({id(owner._memory.arenas) for owner in owners()[-2:]}) == 1


@pytest.mark.inductor
@pytest.mark.exhaustive
def test_with_inductor_pieces(stack: DraftingStack, expected: list[list[int]]) -> None:
    options: dict[str, Any] = {"piece_compiler": "inductor", "pool": MemoryPool(), "max_tokens": 48}
    runner_type, compiler_options = SETUPS["v2 narrow"]
    model, drafter = (compile_host(module, **options, **compiler_options) for module in (stack, stack.drafter))
    runner = runner_type(
        model, stack.config, attention=stack, drafter=drafter, num_draft_tokens=2, buckets=BUCKETS, **LIMITS
    )
    assert serve(runner)[0] == expected
    assert counters.replays > 20


def test_a_verification_has_no_bucket_of_its_own_in_later_steps(stack: DraftingStack) -> None:
    """Without buckets, too: a batch of decodes has the same rows whatever was rejected, so it is captured once."""
    runner_type, options = SETUPS["v2 narrow"]
    model = compile_host(stack, **options)
    runner = runner_type(model, stack.config, attention=stack, drafter=stack.drafter, num_draft_tokens=2, **LIMITS)
    for prompt in make_prompts(5, 3, 7):
        runner.add_request(prompt, 60)
    for _ in range(3):  # prompts, warm-up, capture
        runner.step()
    torch.manual_seed(0)
    with counters.expect(captures=0, recaptures=0, uncaptured_calls=0, replays=12):
        for _ in range(12):
            assert len(runner.step().scheduled) == 3
