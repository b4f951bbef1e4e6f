"""Streams at work: whatever order the events allow, results are those of eager, and no event can be left out."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import program_checks
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from noting_compiler import NotingCompiler
from program_checks import Setting, check_program, register_step_ops
from random_programs import Program, programs
from runtime_helpers import Probe
from stream_runs import ASSIGN_STREAMS, on_streams, replays_in_order
from torch import Tensor
from toy_ops import SPLIT

import dsv4_compile
from benchmarks.attention_stack import stack_and_inputs
from dsv4_compile.analysis.stream_schedule import events_of
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.errors import StreamRaceError
from dsv4_compile.runtime.engines.host.stream_log import HostStreams

every_compiler = pytest.mark.parametrize(
    "compiler", ["eager", "aot_eager", NotingCompiler(), pytest.param("inductor", marks=pytest.mark.inductor)]
)


def random_streams(seed: int) -> Callable[..., tuple[int, ...]]:
    """In place of the scheduler: any streams will do, since events are derived from what must come before what."""
    draw = random.Random(seed)

    def schedule(before: Sequence[Collection[int]], weights: Sequence[int], side_streams: int) -> tuple[int, ...]:
        return tuple(draw.randint(0, side_streams) for _ in before)

    return schedule


@pytest.mark.exhaustive
@every_compiler
@pytest.mark.parametrize("runner", ["mrv1", "mrv2"])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_attention_layers_in_any_order(compiler: Any, runner: str, seed: int | None) -> None:
    stack, inputs = stack_and_inputs(4)
    caches = [buffer for buffer in stack.buffers() if buffer.dim() == 3]
    options = {"aux_streams": 3, "piece_compiler": compiler, "runner": runner, "region": "minimal"}
    compiled = torch.compile(stack, backend="dsv4_piecewise", dynamic=True, options=options)
    with torch.no_grad(), replays_in_order(seed):
        for _ in range(4):
            before = [cache.clone() for cache in caches]
            expected = stack(*inputs)
            written = [cache.clone() for cache in caches]
            for cache, old in zip(caches, before, strict=True):
                cache.copy_(old)
            torch.testing.assert_close(compiled(*inputs), expected)
            for cache, new in zip(caches, written, strict=True):
                torch.testing.assert_close(cache, new)


@pytest.mark.exhaustive
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    program=programs(),
    seed=st.integers(0, 1000),
    region=st.sampled_from(["narrow", "minimal"]),
    check=st.sampled_from(["addresses", "full"]),
)
def test_random_programs_on_random_streams(program: Program, seed: int, region: str, check: str) -> None:
    register_step_ops()
    with_streams = partial(_with_options, {"aux_streams": 3})
    setting = Setting(combination=("mrv2", region), engine="host", check=check, tokens=(5, 5, 5, 5))
    with pytest.MonkeyPatch.context() as patch, replays_in_order(seed), torch.no_grad():
        patch.setattr(program_checks, "dsv4_piecewise", with_streams)
        patch.setattr(ASSIGN_STREAMS, "schedule", random_streams(seed))
        check_program(program.function, setting)


def _with_options(more: dict[str, Any], gm: Any, example_inputs: Any, *, options: dict[str, Any]) -> Any:
    return dsv4_piecewise(gm, example_inputs, options={**options, **more})


def two_branches(x: Tensor, cache: Tensor) -> Tensor:
    """Two branches from one product, which meet at the end; the second one also writes what is read before."""
    h = x @ x.T
    seen = cache.sum()
    a = torch.ops.probe.shift(h @ h).sin()
    b = (h @ h.T).cos()
    cache.add_(1)
    return torch.ops.toy.fresh(a @ b) + seen


OPTIONS = {"split_ops": SPLIT, "aux_streams": 3}


def call_in_streams(streams: Sequence[int], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Results and expected ones of four calls of `two_branches`."""
    with on_streams(streams):
        compiled = torch.compile(two_branches, backend="dsv4_piecewise", dynamic=True, options={**OPTIONS, **options})
        x, cache = torch.randn(4, 4), torch.zeros(4)
        torch._dynamo.mark_static_address(cache)
        eager = cache.clone()
        results, expected = [], []
        for _ in range(4):
            results += [compiled(x, cache), cache.clone()]
            expected += [two_branches(x, eager), eager.clone()]
    return results, expected


# of h, seen, h @ h, shift, sin, h @ h.T, cos, add_; x.T is a view and has none
STREAMS = (0, 2, 1, 1, 1, 0, 3, 3)


@pytest.mark.sampled(2)
@every_compiler
def test_streams_that_cross_each_other(compiler: Any) -> None:
    for seed in range(4):
        torch._dynamo.reset()
        with replays_in_order(seed):
            torch.testing.assert_close(*call_in_streams(STREAMS, piece_compiler=compiler))


def count_of(monkeypatch: pytest.MonkeyPatch, verb: str) -> int:
    """How often a captured graph of `two_branches` calls a verb of its streams."""
    calls: list[int] = []
    original = getattr(HostStreams, verb)

    def counted(self: HostStreams, *args: Any) -> Any:
        calls.append(1)
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(HostStreams, verb, counted)
        call_in_streams(STREAMS)
    torch._dynamo.reset()
    return len(calls)


def test_no_wait_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = HostStreams.wait
    total = count_of(monkeypatch, "wait")
    assert total >= 6  # three streams fork and join
    for left_out in range(total):
        calls = iter(range(total))

        def wait(
            self: HostStreams, stream: int, event: object, calls: Iterator[int] = calls, skip: int = left_out
        ) -> None:
            if next(calls) != skip:
                original(self, stream, event)

        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(HostStreams, "wait", wait)
            with pytest.raises(StreamRaceError, match=r"stream [0-3]"):
                call_in_streams(STREAMS)


def test_no_event_can_be_recorded_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands for the work before the part it should stand for; that of the start stands for nothing."""
    original = HostStreams.record
    total = count_of(monkeypatch, "record")
    for early in range(1, total):
        calls = iter(range(total))
        first: list[int] = []

        def record(
            self: HostStreams, stream: int, calls: Iterator[int] = calls, early: int = early, first: Any = first
        ) -> int:
            event = original(self, stream)
            first.append(event)
            return first[0] if next(calls) == early else event

        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(HostStreams, "record", record)
            with pytest.raises(StreamRaceError):
                call_in_streams(STREAMS)


def test_no_dependence_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut takes its events from the same edges as the scheduler; without one of them the checker speaks up.

    Left out of this are edges that others imply: without them the events are the same.
    """
    cut = importlib.import_module("dsv4_compile.passes.cut_subgraphs")
    original = cut.order_of
    orders: list[list[set[int]]] = []
    with monkeypatch.context() as patch:
        patch.setattr(cut, "order_of", lambda *args: orders.append(original(*args)) or orders[-1])
        call_in_streams(STREAMS)
    whole = max(orders, key=len)
    streams = (*STREAMS, *[0] * len(whole))[: len(whole)]
    crossing = [
        (late, early) for late, before in enumerate(whole) for early in before if streams[late] != streams[early]
    ]
    caught = 0
    for late, early in crossing:
        without = [before - {early} if place == late else before for place, before in enumerate(whole)]
        if events_of(without, streams) == events_of(whole, streams):
            continue
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(
                cut, "order_of", lambda *args, found=without: found if original(*args) == whole else original(*args)
            )
            with pytest.raises(StreamRaceError):
                call_in_streams(STREAMS)
        caught += 1
    assert caught >= 4


def test_a_bucket_above_the_bound_runs_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_of(monkeypatch, "record") > 0
    with monkeypatch.context() as patch:
        patch.setattr(HostStreams, "record", lambda self, stream: pytest.fail("streams are used"))
        torch.testing.assert_close(*call_in_streams(STREAMS, aux_stream_max_tokens=3))
        torch._dynamo.reset()
        with pytest.raises(pytest.fail.Exception, match="streams are used"):
            call_in_streams(STREAMS, aux_stream_max_tokens=4)


def test_the_host_engine_takes_no_side_streams_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStreams, "record", lambda self, stream: pytest.fail("streams are used"))
    torch.testing.assert_close(*call_in_streams(STREAMS, aux_streams="auto"))


@pytest.mark.parametrize("failing_call", [1, 2])
def test_an_op_that_fails_on_a_side_stream_leaves_no_half_made_bucket(
    failing_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the warm-up and in the capture."""
    x, cache = torch.randn(4, 4), torch.zeros(4)
    torch._dynamo.mark_static_address(cache)
    calls = iter(range(1, 10))

    def fail_once(op: str) -> None:
        if next(calls) == failing_call:
            raise ZeroDivisionError("on purpose")

    with on_streams(STREAMS):
        compiled = torch.compile(two_branches, backend="dsv4_piecewise", dynamic=True, options=OPTIONS)
        monkeypatch.setattr(Probe, "called", fail_once)
        for call in range(1, 6):
            if call == failing_call:
                with pytest.raises(ZeroDivisionError, match="on purpose"):
                    compiled(x, cache)
                cache.zero_()
            else:
                cache.zero_()
                result = compiled(x, cache)
                monkeypatch.setattr(Probe, "called", lambda op: None)
                torch.testing.assert_close(result, two_branches(x, torch.zeros(4)))
                assert torch.equal(cache, torch.ones(4))
                monkeypatch.setattr(Probe, "called", fail_once)


def test_a_number_that_changes_is_no_matter_for_streams_alone() -> None:
    def scaled(x: Tensor, scale: float) -> Tensor:
        return (x @ x * scale) @ (x @ x.T)

    with on_streams((0, 1, 1, 0)), dsv4_compile.counters.expect(uncompiled_pieces=0):
        compiled = torch.compile(scaled, backend="dsv4_piecewise", dynamic=True, options=OPTIONS)
        x = torch.randn(4, 4)
        for scale in (0.5, 0.25) * 3:
            torch.testing.assert_close(compiled(x, scale), scaled(x, scale))


def call_twice(model: Any, calls: Sequence[Sequence[Tensor]], **options: Any) -> None:
    """Compare with eager on copies, four times per set of arguments, whose tensors share memory as they do."""
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options={**OPTIONS, **options})
    for args in calls:
        copies = copy.deepcopy(list(args))
        for _ in range(4):
            torch.testing.assert_close(compiled(*args), model(*copies))
            torch.testing.assert_close(args, list(copies))


def add_and_multiply(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    p = x @ w
    a.add_(p[0, :4])
    q = b.expand(4, 4) @ w
    return torch.ops.toy.fresh(p + q)


def static(*tensors: Tensor) -> tuple[Tensor, ...]:
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
    return tensors


def test_a_piece_whose_inputs_share_memory_is_no_copy_of_one_whose_inputs_do_not() -> None:
    """What a copy runs, and on which streams, is what its original does."""

    def both(x: Tensor, w: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return add_and_multiply(add_and_multiply(x, w, a, b), w, c, d)

    memory = torch.randn(4)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with on_streams((0, 1, 2)):
        call_twice(both, [[x, w, *static(torch.randn(4), torch.randn(4), memory[:], memory[:])]])


def test_inputs_that_come_to_share_memory_use_no_stream() -> None:
    memory = torch.randn(4)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    apart, shared = static(torch.randn(4), torch.randn(4)), static(memory[:], memory[:])
    with on_streams((0, 1, 2)), dsv4_compile.counters.expect(captures=1, traced_graph_calls=4):
        call_twice(add_and_multiply, [[x, w, *apart], [x, w, *shared]])
