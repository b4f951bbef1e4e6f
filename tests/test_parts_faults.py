"""An exception anywhere in a call leaves no half-made bucket where pieces have parts: compiled, on lanes, or both.

As `test_faults.py`, at the steps that parts add: choosing what runs a piece, offering lanes, giving a part to a lane,
events, compiled functions and their launches, and the check of what lanes did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import pytest
from fault_points import Events
from fault_points import events as events  # a fixture
from test_faults import PHASES, UNUSUAL, Trial, fail_at, places_of
from test_lane_runs import on_lanes
from torch import fx

from dsv4_compile import counters
from dsv4_compile.runtime import capture_state, compiled_function, host, pieces
from dsv4_compile.runtime.host import HostEngine
from dsv4_compile.runtime.host_lane_log import HostLanes
from dsv4_compile.runtime.host_launch import FunctionLaunch
from dsv4_compile.runtime.host_recorder import Recorder

# Steps that parts and lanes add: attribute of an owner, by the name they have there.
_STEPS = (
    (HostEngine, "warm_up"),
    (HostLanes, "add"),
    (HostLanes, "checked_order"),
    (HostLanes, "record"),
    (HostLanes, "wait"),
    (Recorder, "finish"),
    (Recorder, "record_function"),
    (compiled_function, "launch"),
    (pieces.PartedPiece, "_run"),
    (pieces.PartedPiece, "fill"),
    (pieces.Pieces, "for_call"),
    (compiled_function.CompiledFunction, "run"),
)
_BLOCKS = ((HostLanes, "on"), (host, "offering"), (host, "recording"))


def around_block(events: Events, block: Callable[..., AbstractContextManager[None]], place: str) -> Callable[..., Any]:
    """A context manager with an event before, at the start and at the end of its block."""

    @wraps(block)
    @contextmanager
    def watched(*args: Any) -> Iterator[None]:
        events(f"before {place}")
        with block(*args):
            events(f"into {place}")
            yield
            events(f"out of {place}")

    return watched


@pytest.fixture
def places(events: Events, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Events at the steps of parts and lanes, and inside of recorded functions; their names."""
    for owner, name in _STEPS:
        monkeypatch.setattr(owner, name, events.around(getattr(owner, name), f"part's {name}"))
    for owner, name in _BLOCKS:
        monkeypatch.setattr(owner, name, around_block(events, getattr(owner, name), f"block {name}"))
    bind = FunctionLaunch.bind
    monkeypatch.setattr(FunctionLaunch, "bind", lambda self: events.around(bind(self), "compiled function"))
    names = {f"{when} part's {name}" for _, name in _STEPS for when in ("before", "after")}
    names |= {f"{when} block {name}" for _, name in _BLOCKS for when in ("before", "into", "out of")}
    return names | {"before compiled function", "after compiled function"}


def run_graph(gm: fx.GraphModule, fakes: Any) -> Callable[..., Any]:
    """A piece compiler: the graph as it is, as one launch."""
    return gm.forward


PARTED = {"aux_streams": 3, "piece_compiler": run_graph}
FEWEST = {"warm-up": 30, "capture": 90, "replay": 4, "recapture": 90}


@pytest.mark.parametrize("options", [PARTED, {**UNUSUAL, **PARTED}], ids=["defaults", "unusual"])
@pytest.mark.parametrize("phase", PHASES)
def test_call_after_a_failed_one_is_right(
    phase: str, options: dict[str, Any], events: Events, places: set[str]
) -> None:
    prepare, expected = PHASES[phase]
    with on_lanes((0, 1, 2, 0, 3)):
        trial = Trial(**options)
    memory = trial.memory()
    met = [(point, place) for point, place in enumerate(places_of(trial, events, prepare)) if place in places]
    assert len(met) >= FEWEST[phase], len(met)
    for point, place in met:
        trial.begin_again()
        prepare(trial)
        fail_at(trial, events, point)
        assert events.seen[point] == place  # others may come behind it, such as the joins of a part that failed
        assert set(vars(capture_state._recorded).values()) <= {None}, place
        assert trial.num_captured() == (phase == "replay"), place
        trial.model.load_state_dict(trial.start)
        with counters.expect(uncompiled_pieces=0, **expected):
            for _ in range(3):
                trial.call()
    assert trial.memory() == memory
