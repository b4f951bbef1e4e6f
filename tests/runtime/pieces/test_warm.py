"""A piece is captured once the very function that is captured has run, on arguments of the same alignment.

`jit` does what an op of Triton's does: for arguments that it has not seen it compiles, which no capture can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from case_helpers import rows
from runtime_helpers import Probe, compile_host
from torch import Tensor, fx, nn
from torch.library import Library

from dsv4_compile import counters, is_capturing
from dsv4_compile.runtime.engines.host.engine import HostEngine

probe = torch.ops.probe
LIBRARY = Library("warm_pieces", "DEF")
LIBRARY.define("jit(Tensor x) -> Tensor")
LIBRARY.define("jit_add_(Tensor(a!) x) -> ()")
LIBRARY.define("unaligned(Tensor x) -> Tensor")
kernels: set[tuple[str, int]] = set()


def _compile_for(name: str, x: Tensor) -> None:
    kernel = name, x.data_ptr() % 16
    if kernel not in kernels:
        if is_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        kernels.add(kernel)


def _jit(x: Tensor) -> Tensor:
    _compile_for("jit", x)
    return x * 2


def _jit_add(x: Tensor) -> None:
    _compile_for("jit_add_", x)
    x.add_(1)


def _unaligned(x: Tensor) -> Tensor:
    return misaligned(x.shape).copy_(x)


for _name, _body, _fake in (
    ("jit", _jit, torch.empty_like),
    ("jit_add_", _jit_add, lambda x: None),
    ("unaligned", _unaligned, torch.empty_like),
):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"warm_pieces::{_name}", _fake, lib=LIBRARY)
ops = torch.ops.warm_pieces


def misaligned(shape: Any) -> Tensor:
    return torch.zeros(1 + torch.Size(shape).numel())[1:].view(shape)


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    kernels.clear()
    with torch.no_grad():
        yield


def compiled(function: Any, **options: Any) -> Any:
    return compile_host(function, split_ops=("probe::give", "warm_pieces::unaligned"), **options)


# alignment


def test_an_input_that_is_copied_in_is_aligned_there() -> None:
    call = compiled(lambda x: probe.give(ops.jit(x) + 1))
    with counters.expect(uncaptured_calls=1, captures=1, replays=3):
        for value in range(4):
            x = misaligned((5, 4)).fill_(value)
            assert torch.equal(call(x), 3 * (2 * x + 1))
    assert kernels == {("jit", 4), ("jit", 0)}


def test_what_a_region_gives_is_aligned_in_its_slot() -> None:
    call = compiled(lambda x: ops.jit(ops.unaligned(x)) + 1)
    with counters.expect(uncaptured_calls=1, captures=1, replays=3):
        for value in range(4):
            x = torch.full((5, 4), float(value))
            assert torch.equal(call(x), 2 * x + 1)
    assert kernels == {("jit", 4), ("jit", 0)}


@pytest.mark.parametrize("first", [0, 1])
def test_a_cache_that_is_elsewhere_in_the_next_call(first: int) -> None:
    """It is written in place, wherever the call has it; and copied in once it was seen to move."""

    def f(x: Tensor, cache: Tensor) -> Tensor:
        ops.jit_add_(cache)
        return probe.give(x) + cache

    call = compiled(f)
    made = (torch.zeros, misaligned)
    for step in range(8):
        cache, x = made[(first + step) % 2]((5, 4)).fill_(step), rows(5)
        assert torch.equal(call(x, cache), 3 * x + (step + 1))
        assert torch.equal(cache, torch.full((5, 4), step + 1.0))
    assert kernels == {("jit_add_", 4), ("jit_add_", 0)}


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = probe.give(x * ops.jit(self.w)) + 1
        return result


def test_a_weight_that_moves_to_another_alignment() -> None:
    model = Weighted()
    call, x = compiled(model), rows(5)
    for _ in range(3):
        call(x)
    model.w.data = misaligned((4,)).fill_(5)
    with counters.expect(uncaptured_calls=0, recaptures=1, replays=3):
        for _ in range(3):
            assert torch.equal(call(x), 3 * (x * 10) + 1)
    assert kernels == {("jit", 4), ("jit", 0)}


# the very function


@pytest.mark.parametrize("shares", ["memory", "nothing"])
def test_a_bucket_whose_first_call_did_not_run_the_plan_is_warmed_up(
    shares: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs that share memory, one of them written, have the traced graph run."""
    seen: list[str] = []
    capture = HostEngine.capture

    def compiler(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: seen.append("run") or gm(*args)

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append("capture")
        return capture(*args, **kwargs)

    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        return probe.give((x * 2).sin()) + cache.sum()

    monkeypatch.setattr(HostEngine, "capture", noting)
    call = compiled(f, piece_compiler=compiler)
    call(torch.ones(2, 4), torch.zeros(8))
    memory = torch.zeros(5 * 4)
    seen.clear()
    call(memory.view(5, 4) if shares == "memory" else torch.zeros(5, 4), memory)
    assert seen == ([] if shares == "memory" else ["run", "run"])
    for _ in range(3):
        call(torch.ones(5, 4), torch.zeros(20))
    assert seen[:3] == ["run", "run", "capture"]


# captures that fail


def test_after_a_capture_that_failed_its_pieces_run_before_they_are_captured() -> None:
    call = compiled(lambda x: probe.give(ops.jit(x) + 1))
    x = rows(5)
    call(x)
    kernels.clear()  # as if the warm-up had run another kernel
    with pytest.raises(RuntimeError, match="not permitted"), counters.expect(captures=0):
        call(x)
    with counters.expect(uncaptured_calls=0, captures=1, replays=3):
        for value in range(3):
            x.fill_(value)
            assert torch.equal(call(x), 3 * (2 * x + 1))


def test_what_runs_before_its_capture_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes and random draws of the call are those of eager, and so are those of the next."""

    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        return probe.give(x + torch.rand_like(x)) + torch.rand_like(x) * cache

    call, capture = compiled(f), HostEngine.capture
    x, cache = rows(5), torch.zeros(4)
    torch._dynamo.mark_static_address(cache)
    call(x, cache)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(HostEngine, "capture", fail)
    with pytest.raises(ZeroDivisionError):
        call(x, cache)
    monkeypatch.setattr(HostEngine, "capture", capture)
    with counters.expect(captures=1, replays=3, uncaptured_calls=0):
        for seed in range(3):
            torch.manual_seed(seed)
            before = cache.clone()
            found, drawn = call(x, cache), torch.rand(2)
            torch.manual_seed(seed)
            assert torch.equal(found, f(x, before))
            assert torch.equal(drawn, torch.rand(2))
            assert torch.equal(cache, before)


def test_a_failure_of_a_region_leaves_the_bucket_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    call = compiled(lambda x: probe.give(probe.shift(x) * 2) + 1)
    x = rows(5)
    call(x)
    shifts: list[bool] = []

    def called(op: str) -> None:
        if op == "give":
            raise ZeroDivisionError("on purpose")
        shifts.append(is_capturing())

    monkeypatch.setattr(Probe, "called", staticmethod(called))
    with pytest.raises(ZeroDivisionError):
        call(x)
    monkeypatch.setattr(
        Probe, "called", staticmethod(lambda op: shifts.append(is_capturing()) if op == "shift" else None)
    )
    call(x)
    assert shifts == [True, True]
