"""An exception anywhere in a call leaves no half-made bucket: it passes on, and the next call is right.

Every step of a call is made to fail in turn, in each kind of call: the warm-up, the capture, a replay, and the capture
after a weight has moved. See `fault_points.py` for what a step is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_helpers import rows
from fault_points import Events, InjectedError, InjectedInterrupt
from fault_points import events as events  # a fixture
from fault_trials import PHASES, UNUSUAL, Model, Trial, fail_at, places_of
from runtime_helpers import Allocations, Probe, compile_host, entries
from runtime_helpers import allocations as allocations  # a fixture
from torch import Tensor
from toy_ops import Host

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import CaptureError

toy, probe = torch.ops.toy, torch.ops.probe


FEWEST_PLACES = {"warm-up": 15, "capture": 80, "replay": 30, "recapture": 80}


@pytest.mark.sampled(9)
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
    """As in eager: the cache holds the row, although the call failed after it."""
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
    """Its warm-up call runs; each capturing call raises and keeps nothing, until the op reads no value any more.

    It is registered as one that is to be captured; any other would be eager from then on (test_refused_captures.py).
    """
    dsv4_compile.register_op("probe::shift", role="capture")

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
