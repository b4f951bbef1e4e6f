"""An exception anywhere in a call leaves no half-made bucket where pieces have parts: compiled, on streams, or both.

As `test_faults.py`, at the steps that parts add: choosing what runs a piece, offering streams, giving a part to a
stream, events, compiled functions and their launches, and the check of what streams did.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
import torch._inductor.config
from case_helpers import rows
from fault_points import Events, InjectedError, InjectedInterrupt
from fault_points import events as events  # a fixture
from fault_trials import PHASES, UNUSUAL, Model, Trial, fail_at, global_state, places_of
from runtime_helpers import compile_host
from stream_runs import on_streams
from subgraph_options import PARTED
from torch import fx
from torch._dynamo.symbolic_convert import TensorifyState

from dsv4_compile import counters
from dsv4_compile.errors import OptionError, PieceCompileError
from dsv4_compile.runtime.engines import capture_state
from dsv4_compile.runtime.engines.host import engine as host
from dsv4_compile.runtime.engines.host.engine import HostEngine
from dsv4_compile.runtime.engines.host.launch import FunctionLaunch
from dsv4_compile.runtime.engines.host.recorder import Recorder
from dsv4_compile.runtime.engines.host.stream_log import HostStreams
from dsv4_compile.runtime.memory.overlap import Aliasing
from dsv4_compile.runtime.pieces import compiled as compiled_function
from dsv4_compile.runtime.pieces import pieces

# Steps that parts and streams add: attribute of an owner, by the name they have there.
_STEPS = (
    (HostEngine, "warm_up"),
    (HostStreams, "add"),
    (HostStreams, "checked_order"),
    (HostStreams, "record"),
    (HostStreams, "wait"),
    (Recorder, "finish"),
    (Recorder, "record_function"),
    (compiled_function, "launch"),
    (pieces.SubgraphPiece, "_run"),
    (pieces.SubgraphPiece, "fill"),
    (pieces.Pieces, "for_call"),
    (compiled_function.CompiledFunction, "run"),
)
_BLOCKS = ((HostStreams, "on"), (host, "offering"), (host, "recording"))


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
    """Events at the steps of parts and streams, and inside of recorded functions; their names."""
    for owner, name in _STEPS:
        monkeypatch.setattr(owner, name, events.around(getattr(owner, name), f"part's {name}"))
    for owner, name in _BLOCKS:
        monkeypatch.setattr(owner, name, around_block(events, getattr(owner, name), f"block {name}"))
    bind = FunctionLaunch.bind
    monkeypatch.setattr(FunctionLaunch, "bind", lambda self: events.around(bind(self), "compiled function"))
    names = {f"{when} part's {name}" for _, name in _STEPS for when in ("before", "after")}
    names |= {f"{when} block {name}" for _, name in _BLOCKS for when in ("before", "into", "out of")}
    return names | {"before compiled function", "after compiled function"}


FEWEST = {"warm-up": 30, "capture": 90, "replay": 4, "recapture": 90}


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [PARTED, {**UNUSUAL, **PARTED}], ids=["defaults", "unusual"])
@pytest.mark.parametrize("phase", PHASES)
def test_call_after_a_failed_one_is_right(
    phase: str, options: dict[str, Any], events: Events, places: set[str]
) -> None:
    prepare, expected = PHASES[phase]
    with on_streams((0, 1, 2, 0, 3)):
        trial = Trial(**options)
    memory = trial.memory()
    met = [(point, place) for point, place in enumerate(places_of(trial, events, prepare)) if place in places]
    assert len(met) >= FEWEST[phase], len(met)
    for point, place in met:
        trial.begin_again()
        prepare(trial)
        fail_at(trial, events, point)
        assert events.seen[point] == place  # others may come after it, such as the joins of a part that failed
        assert not any(vars(capture_state._recorded).values()), place
        assert trial.num_captured() == (phase == "replay"), place
        trial.model.load_state_dict(trial.start)
        with counters.expect(uncompiled_pieces=0, **expected):
            for _ in range(3):
                trial.call()
    assert trial.memory() == memory


class Compiler:
    """A piece compiler that fails at one of its parts."""

    def __init__(self) -> None:
        self.fails_at = 0
        self.error: BaseException = InjectedError("compiler")
        self.seen = 0

    def __call__(self, gm: fx.GraphModule, fakes: Any) -> Callable[..., Any]:
        self.seen += 1
        if self.seen - 1 == self.fails_at:
            raise self.error
        return gm.forward


def surroundings_of_a_compiler() -> tuple[Any, ...]:
    """What a compiler of parts runs in, and nothing else."""
    return (
        global_state(),
        torch._guards.TracingContext.try_get(),
        set(TensorifyState.force_specializations),
        torch._inductor.config.get_config_copy(),
    )


COMPILED_PARTS = 5  # what is between the custom ops of three pieces, on the streams of the test


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "error", [InjectedError("on purpose"), InjectedInterrupt("on purpose"), OptionError("on purpose")], ids=type
)
def test_compiler_that_fails_at_any_part_is_asked_again_in_the_next_call(error: BaseException) -> None:
    compiler, model, x = Compiler(), Model(), rows(5)
    eager = copy.deepcopy(model)
    wanted = PieceCompileError if isinstance(error, InjectedError) else type(error)
    with on_streams((0, 1, 2, 0, 3)), torch.no_grad():
        compiled = compile_host(model, aux_streams=3, piece_compiler=compiler)
        before = surroundings_of_a_compiler()
        for compiler.fails_at in range(COMPILED_PARTS):
            torch._dynamo.reset()
            compiler.seen, compiler.error = 0, error
            with pytest.raises(wanted, match="on purpose"):
                compiled(x)
            assert surroundings_of_a_compiler() == before
            compiler.seen = COMPILED_PARTS  # no part fails
            results = [compiled(x) for _ in range(3)]
            expected = [eager(x) for _ in range(3)]
            assert all(all(map(torch.equal, *pair)) for pair in zip(results, expected, strict=True))
            assert torch.equal(model.get_buffer("cache"), eager.get_buffer("cache"))  # the failed call left it alone
        assert compiler.seen == 2 * COMPILED_PARTS


def test_a_replay_asks_nothing_about_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether inputs share memory and which numbers there are is settled by the key of a program."""
    with on_streams((0, 1, 2, 0, 3)):
        trial = Trial(**PARTED)
    for _ in range(2):
        trial.call()
    for owner, name in ((pieces.Pieces, "for_call"), (Aliasing, "differs"), (pieces.SubgraphPiece, "fill")):
        monkeypatch.setattr(owner, name, lambda *args: pytest.fail("asked in a replay"))
    with counters.expect(replays=2, captures=0, uncaptured_calls=0):
        for _ in range(2):
            trial.call()
