"""An exception anywhere in a call leaves no half-made bucket: it passes on, and the next call is right.

Every step of a call is made to fail in turn, in each kind of call: the warm-up, the capture, a replay, and the capture
after a weight has moved. See `fault_points.py` for what a step is.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from case_helpers import rows
from fault_points import Events, InjectedError, InjectedInterrupt
from fault_points import events as events  # a fixture
from runtime_helpers import Allocations, Probe, compile_host, entries, live_bytes, the_owner
from runtime_helpers import allocations as allocations  # a fixture
from torch import Tensor, nn
from toy_ops import Host

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import CaptureError

toy, probe = torch.ops.toy, torch.ops.probe


class Model(nn.Module):
    """Two regions between three pieces; it writes a cache from a piece, and has autocast around one op."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)
        self.register_buffer("cache", torch.randn(16, 4, generator=generator))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = probe.shift(x @ self.w)
        probe.store(h, self.cache)
        out = torch.empty_like(h)
        probe.core(h, out)
        both = probe.shift(out) + h
        left, right = both[:, :2], both[:, 2:]
        with torch.autocast("cpu", torch.bfloat16):
            y = probe.give(left) @ self.w[:2]
        return y + right.sum(), self.cache[: x.shape[0]], left


class Trial:
    """A model compiled, and its eager twin, that go through the same calls."""

    def __init__(self, **options: Any) -> None:
        self.model = Model()
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.compiled = compile_host(self.model, **options)
        self.call()
        self.owner = the_owner()

    def call(self, n: int = 5) -> None:
        """One call that must be right."""
        x, twin = rows(n), copy.deepcopy(self.model)
        with torch.no_grad():
            wanted, results = twin(x), self.compiled(x)
        assert all(map(torch.equal, results, wanted))
        assert torch.equal(self.model.cache, twin.cache)

    def begin_again(self) -> None:
        """Nothing captured, nothing warm, and the first weights and caches."""
        self.owner.release()
        self.model.load_state_dict(self.start)

    def num_captured(self) -> int:
        """Buckets that are captured with the weights and caches of now."""
        addresses = {self.model.w.data_ptr(), self.model.cache.data_ptr()}
        return sum(set(entry.anchors) == addresses for entry in self.owner._entries._entries.values())

    def memory(self) -> tuple[int, int]:
        """Bytes that are alive, and those of the pool, after one clean capture."""
        self.begin_again()
        for _ in range(3):
            self.call()
        return live_bytes(), self.owner._pool.nbytes

    def move_weight(self) -> None:
        self.model.w.data = self.model.w.data.clone()


PHASES: dict[str, tuple[Callable[[Trial], object], dict[str, int]]] = {
    # what to do before the call that fails; what the three calls behind it have to count
    "warm-up": (lambda trial: None, {"uncaptured_calls": 1, "captures": 1, "recaptures": 0, "replays": 2}),
    "capture": (lambda trial: trial.call(), {"uncaptured_calls": 0, "captures": 1, "recaptures": 0, "replays": 3}),
    "replay": (
        lambda trial: [trial.call() for _ in range(2)],
        {"uncaptured_calls": 0, "captures": 0, "recaptures": 0, "replays": 3},
    ),
    "recapture": (
        lambda trial: [trial.call(), trial.call(), trial.move_weight()],
        {"uncaptured_calls": 0, "captures": 1, "recaptures": 1, "replays": 3},
    ),
}


def global_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        gc.isenabled(),
        dsv4_compile.is_capturing(),
        torch.get_rng_state().tolist(),
    )


@contextmanager
def collector(enabled: bool) -> Iterator[None]:
    """The garbage collector as some caller may have set it."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if before else gc.disable)()


def fail_at(trial: Trial, events: Events, point: int) -> str:
    """Let the call fail at one of its events; returns the place. Raises what should not happen."""
    x = rows(5)
    with collector(enabled=point % 2 == 0), torch.no_grad():
        before = global_state()
        events.arm(point)
        with pytest.raises((InjectedError, InjectedInterrupt)) as caught:
            trial.compiled(x)
        events.stop()
        assert caught.value is events.raised
        events.raised = None  # with its traceback go the values of the call
        assert global_state() == before
    return events.seen[-1]


# A full check runs each piece a second time; the arena is locked; each bucket has a pool; outputs have buffers.
UNUSUAL = {"check": "full", "max_tokens": 16, "pool": "bucket", "static_outputs": True}
FEWEST_PLACES = {"warm-up": 15, "capture": 80, "replay": 30, "recapture": 80}


@pytest.mark.parametrize("options", [{}, UNUSUAL], ids=["defaults", "unusual"])
@pytest.mark.parametrize("phase", PHASES)
def test_call_after_a_failed_one_is_right(
    phase: str, options: dict[str, Any], events: Events, allocations: Allocations
) -> None:
    trial = Trial(**options)
    memory = trial.memory()
    prepare, expected = PHASES[phase]
    places = places_of(trial, events, prepare)
    assert len(places) >= FEWEST_PLACES[phase]  # 2 * 205 faults at least
    for point, place in enumerate(places):
        trial.begin_again()
        prepare(trial)
        assert fail_at(trial, events, point) == place
        is_kept = phase == "replay" or place == "after add"  # the bucket was complete when the call failed
        assert trial.num_captured() == is_kept, place
        trial.model.load_state_dict(trial.start)
        with counters.expect(**(PHASES["replay"][1] if is_kept else expected)):
            for _ in range(3):
                trial.call()
        assert trial.num_captured() == 1
    assert trial.memory() == memory
    assert len(allocations.alive) == (3 if options else 1)  # the arena, and buffers of two outputs


def places_of(trial: Trial, events: Events, prepare: Callable[[Trial], object]) -> list[str]:
    """Everything at which the call that `prepare` prepares for can fail."""
    trial.begin_again()
    prepare(trial)
    events.watch()
    with torch.no_grad():
        trial.compiled(rows(5))
    events.stop()
    return list(events.seen)


# faults of one kind each


def test_failed_calls_draw_the_random_numbers_that_eager_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor) -> Tensor:
        h = x + torch.rand_like(x)
        out = torch.empty_like(h)
        toy.hook(h, out)
        return out + torch.rand_like(x)

    def fail(q: Tensor) -> Tensor:
        raise InjectedError("hook")

    compiled = compile_host(f, split_ops=("toy::hook",))
    x = rows(5)
    for index in range(6):
        torch.manual_seed(index)
        with torch.no_grad():
            wanted = f(x)
            torch.manual_seed(index)
            monkeypatch.setattr(Host, "function", staticmethod(fail))
            with pytest.raises(InjectedError):
                compiled(x)
            monkeypatch.undo()
            drawn = torch.get_rng_state()
            torch.manual_seed(index)
            torch.rand_like(x)
            assert torch.equal(torch.get_rng_state(), drawn)  # those before the failure
            torch.manual_seed(index)
            assert torch.equal(compiled(x), wanted)


def test_what_was_written_before_the_failure_stays_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in eager: the cache holds the row, although the call failed behind it."""
    model = Model()
    compiled = compile_host(model)
    for index in range(5):
        model.cache.zero_()
        with torch.no_grad():
            compiled(rows(5))
            model.cache.zero_()
            monkeypatch.setattr(Probe, "called", staticmethod(fail_in_core))
            with pytest.raises(InjectedError):
                compiled(torch.ones(5, 4))
            monkeypatch.undo()
        assert torch.equal(model.cache[:5], (1 + model.w.sum(0)).expand(5, 4)), index


def test_what_was_written_back_before_the_failure_stays_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor) -> Tensor:
        x.add_(1)
        out = torch.empty_like(x)
        probe.core(x, out)
        return out

    compiled = compile_host(f)
    with torch.no_grad():
        for _ in range(6):  # x turns out to move
            compiled(rows(5))
        x = torch.zeros(5, 4)
        monkeypatch.setattr(Probe, "called", staticmethod(fail_in_core))
        with pytest.raises(InjectedError), counters.expect(captures=0, uncaptured_calls=0):
            compiled(x)
    assert torch.equal(x, torch.ones(5, 4))


def fail_in_core(op: str) -> None:
    if op == "core":
        raise InjectedError(op)


def test_piece_that_no_graph_can_hold_is_refused_until_it_is_mended() -> None:
    """Its warm-up call runs; each capturing call raises and keeps nothing, until the op reads no value any more."""

    def read_a_value(op: str) -> None:
        torch.ones(()).item()

    compiled = compile_host(lambda x: probe.give(probe.shift(x) * 2) + 1)
    x = rows(5)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "called", staticmethod(read_a_value))
        compiled(x)
        for _ in range(3):
            with pytest.raises(CaptureError, match="piece_0"), counters.expect(captures=0):
                compiled(x)
            assert entries() == []
    with torch.no_grad(), counters.expect(captures=1, replays=3, uncaptured_calls=0):
        for _ in range(3):
            assert torch.equal(compiled(x), 3 * (2 * (x + 1)) + 1)


def test_failure_in_one_bucket_leaves_the_others_alone(events: Events) -> None:
    trial = Trial()
    for n in (5, 5, 6, 6, 7):
        trial.call(n)
    with torch.no_grad(), counters.expect(captures=0, recaptures=0):
        events.arm(40)
        with pytest.raises((InjectedError, InjectedInterrupt)):
            trial.compiled(rows(7))
        events.stop()
    with counters.expect(captures=1, replays=4, uncaptured_calls=0):
        for n in (5, 6, 7, 7):
            trial.call(n)
