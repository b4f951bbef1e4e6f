"""An interrupt anywhere in a call leaves nothing behind: no mode, no lock, no switch, and the next call is right.

Where `test_faults.py` lets chosen steps fail, a signal handler may raise between any two bytecodes, also where a block
is entered or left. The places of a call are too many for each run, so a part is drawn; `exhaustive` takes all of them.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from case_helpers import rows
from fault_trials import PHASES, UNUSUAL, Trial
from interrupts import HandlerError, Interrupts
from runtime_helpers import compile_host, the_owner
from torch.utils import _python_dispatch

import dsv4_compile
from dsv4_compile.compat.thread_state import TorchState
from dsv4_compile.runtime import restore_inputs
from dsv4_compile.runtime.engines import capture_state

pytestmark = [
    # a generator that is freed at a place swallows what is raised there
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    # CPython keeps an exception as the one that is being handled, if a tracer raises in the last bytecodes of a handler
    pytest.mark.own_thread,
]
# for each phase, how many of its places a default run takes
SAMPLES = {"warm-up": 4, "capture": 12, "replay": 4, "recapture": 5}  # of each kind of event; more are exhaustive
EVENTS: dict[str, dict[str, Any]] = {"calls": {}, "lines": {"lines": True}, "bytecodes": {"opcodes": True}}
AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def state_of_thread() -> list[Any]:
    """What must be as before."""
    return [
        TorchState.now(),
        torch.is_inference_mode_enabled(),
        gc.isenabled(),
        dsv4_compile.is_capturing(),
        capture_state._capture_lock._is_owned(),  # type: ignore[attr-defined]
        [value for value in vars(capture_state._recorded).values() if value],
        restore_inputs.is_restoring(),
        dsv4_compile.counters._lock._is_owned(),  # type: ignore[attr-defined]
        _python_dispatch._is_in_torch_dispatch_mode,
        _python_dispatch._is_in_non_infra_torch_dispatch_mode,
        _python_dispatch._is_in_any_mode_without_ignore_compile_internals,
    ]


def interrupted(interrupts: Interrupts, call: Callable[[], Any]) -> None:
    """One call that is interrupted, unless it ends before, since caches are filled now.

    An error of a handler may have been taken for one of torch's, and be gone, or be the cause of another one.
    """
    try:
        interrupts.run(call)
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, interrupts.error):
            cause = cause.__cause__ or cause.__context__
        if cause is None or not interrupts.raised:
            raise
    assert interrupts.raised or interrupts.at + 1 > 0.9 * len(interrupts.places)  # type: ignore[operator]


def places_of(call: Callable[[], Any], **events: Any) -> list[str]:
    interrupts = Interrupts("__call__", **events)
    interrupts.run(call)
    return interrupts.places


def drawn(places: list[str], most: int, seed: object) -> list[int]:
    """Some of the places: the first and last ones, which are where a call begins and ends, and others by chance."""
    ends = [*range(min(4, len(places))), *range(max(0, len(places) - 6), len(places))]
    others = random.Random(str(seed)).sample(range(len(places)), min(most, len(places)))
    return sorted({*ends, *others})


def check_phase(
    trial: Trial, phase: str, events: str, error: type[BaseException], choose: Callable[[list[str]], list[int]]
) -> None:
    """Interrupt a call of one phase at the chosen ones of its places, and look at what is left each time."""
    prepare, _ = PHASES[phase]

    def begin() -> None:
        trial.begin_again()
        prepare(trial)

    for _ in range(2):  # the first time fills caches, and takes more steps than later ones
        begin()
        with torch.no_grad():
            places = places_of(lambda: trial.compiled(rows(5)), **EVENTS[events])
    for at in choose(places):
        begin()
        with torch.no_grad():
            before, x = state_of_thread(), rows(5)
            interrupts = Interrupts("__call__", at=at, error=error, **EVENTS[events])
            interrupted(interrupts, lambda x=x: trial.compiled(x))  # type: ignore[misc]
            assert state_of_thread() == before, interrupts.places[-1]
        assert trial.owner._serving == {}, interrupts.places[-1]
        trial.model.load_state_dict(trial.start)
        uncaptured = dsv4_compile.counters.uncaptured_calls
        for _ in range(3):
            trial.call()
        assert trial.num_captured() == 1, interrupts.places[-1]
        assert dsv4_compile.counters.uncaptured_calls - uncaptured <= 1, interrupts.places[-1]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("options", [{}, UNUSUAL], ids=["defaults", "unusual"])
@pytest.mark.parametrize("phase", PHASES)
def test_call_after_an_interrupted_one_is_right(phase: str, options: dict[str, Any], events: str) -> None:
    seed = (phase, events, KeyboardInterrupt)
    check_phase(Trial(**options), phase, events, KeyboardInterrupt, lambda places: drawn(places, SAMPLES[phase], seed))


@pytest.mark.parametrize("events", ["lines", pytest.param("bytecodes", marks=pytest.mark.exhaustive)])
def test_each_place_of_what_surrounds_a_capture(events: str) -> None:
    """What is paused for a capture goes on after it."""
    around = ("recording", "_paused_gc", "_no_autocast_cache")

    def choose(places: list[str]) -> list[int]:
        inside = [at for at, place in enumerate(places) if place.split()[1].split(":")[0] in around]
        once = {places[at]: at for at in reversed(inside)} if events == "lines" else dict(enumerate(inside))
        assert len(once) > 20
        return sorted(once.values())

    check_phase(Trial(), "capture", events, KeyboardInterrupt, choose)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("options", [{}, UNUSUAL], ids=["defaults", "unusual"])
@pytest.mark.parametrize("phase", PHASES)
def test_call_after_one_interrupted_at_many_places_is_right(
    phase: str, options: dict[str, Any], events: str, request: pytest.FixtureRequest
) -> None:
    """At as many as `--places` says: 100000 are all of them, and take hours."""
    most, seed = request.config.getoption("--places"), (phase, events, KeyboardInterrupt)
    check_phase(Trial(**options), phase, events, KeyboardInterrupt, lambda places: drawn(places, most, seed))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("phase", PHASES)
def test_an_error_that_a_signal_handler_raises(phase: str) -> None:
    """Careless code takes it for a refusal of torch's: `except RuntimeError`."""
    seed = (phase, "calls", HandlerError)
    check_phase(Trial(), phase, "calls", HandlerError, lambda places: drawn(places, SAMPLES[phase], seed))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """A test that fails leaves nothing to the next one."""
    before = TorchState.now()
    yield
    before.restore()
    before.restore_flags()


@pytest.fixture
def branches() -> Any:
    """A compiled function whose pieces run on streams, with a piece compiler that calls torch."""
    toy = torch.ops.toy
    w = torch.randn(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        left, right = (x @ w).relu(), (x @ w.t()).tanh()
        return toy.fresh(left + right).exp() @ w

    return function, compile_host(function, piece_compiler="aot_eager", aux_streams=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("around", AROUND)
def test_what_surrounds_a_call_is_as_before(around: str, branches: Any) -> None:
    function, compiled = branches
    owner: Any = None
    # a call without grad and one inside of other modes are two graphs
    with torch.no_grad(), AROUND[around]():
        compiled(rows(5))
        owner = the_owner()
        places = places_of(lambda: compiled(rows(5)))
        for at in drawn(places, 40, around):
            owner.release()
            compiled(rows(5))
            before = state_of_thread()
            interrupts = Interrupts("__call__", at=at)
            interrupted(interrupts, lambda: compiled(rows(5)))
            assert state_of_thread() == before, interrupts.places[-1]
            for _ in range(2):
                x = rows(5)
                torch.testing.assert_close(compiled(x), function(x))
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["host", "off"])
def test_capture_ahead_of_serving_is_interrupted(engine: str) -> None:
    """The caches are put back, and later calls do not go on putting theirs back."""
    trial = Trial(engine=engine)

    def capture() -> None:
        dsv4_compile.capture(trial.compiled, lambda n: (rows(n),), [5], progress=False)

    trial.release()
    interrupts = Interrupts("capture", lines=True)
    interrupts.run(capture)
    for at in drawn(interrupts.places, 60, engine):
        trial.release()
        trial.model.load_state_dict(trial.start)
        before, random_state = state_of_thread(), torch.get_rng_state()
        interrupts = Interrupts("capture", lines=True, at=at)
        interrupted(interrupts, capture)
        assert state_of_thread() == before, interrupts.places[-1]
        assert torch.equal(torch.get_rng_state(), random_state), interrupts.places[-1]
        assert torch.equal(trial.model.cache, trial.start["cache"]), interrupts.places[-1]
        trial.call()


def test_compilation_is_interrupted() -> None:
    """What a pass pushes is gone too."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.fresh(x * 2 + 1) @ x.t()

    def fresh() -> Any:
        torch._dynamo.reset()
        return compile_host(function)

    x = rows(5)
    interrupts = Interrupts("compile_graph")
    with torch.no_grad():
        interrupts.run(lambda: fresh()(x))
        for at in drawn(interrupts.places, 6, "compile"):
            compiled, before = fresh(), state_of_thread()
            interrupts = Interrupts("compile_graph", at=at)
            interrupted(interrupts, lambda compiled=compiled: compiled(x))  # type: ignore[misc]
            assert state_of_thread() == before, interrupts.places[-1]
            assert torch.equal(compiled(x), function(x))


@pytest.mark.exhaustive
def test_an_exception_that_is_kept_brings_nothing_back() -> None:
    """Its traceback keeps the frames of blocks that were cut short; their last lines must not run any later."""
    trial = Trial()
    for _ in range(2):  # the second capture asks no meta kernel what the first one asked, nor do those below
        trial.begin_again()
        trial.call()
        with torch.no_grad():
            places = places_of(lambda: trial.compiled(rows(5)))
    with torch.no_grad():
        at_exits = [at for at, place in enumerate(places) if "__exit__" in place or "__enter__" in place]
        for at in drawn([places[index] for index in at_exits], 10, "kept"):
            trial.begin_again()
            trial.call()
            kept: list[BaseException] = []
            interrupts = Interrupts("__call__", at=at_exits[at])
            try:
                interrupts.run(lambda: trial.compiled(rows(5)))
            except KeyboardInterrupt as error:
                kept.append(error)
            assert kept
            with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
                before = state_of_thread()
                kept.clear()
                gc.collect()
                assert state_of_thread() == before, places[at_exits[at]]


def test_two_threads_and_an_interrupt_in_one() -> None:
    """The lock of captures is free for the others."""
    from concurrent.futures import ThreadPoolExecutor

    trial, other = Trial(), Trial()
    trial.begin_again()
    trial.call()
    with torch.no_grad():
        places = places_of(lambda: trial.compiled(rows(5)), lines=True)
    with ThreadPoolExecutor(1) as pool:
        for at in drawn(places, 25, "threads"):
            trial.begin_again()
            trial.call()
            with torch.no_grad():
                interrupted(Interrupts("__call__", lines=True, at=at), lambda: trial.compiled(rows(5)))

            def serve() -> None:
                other.begin_again()
                for _ in range(3):
                    other.call()

            pool.submit(serve).result(timeout=250)


def test_a_call_that_ends_well_changes_nothing() -> None:
    with nullcontext():
        trial, before = Trial(), state_of_thread()
        for _ in range(3):
            trial.call()
        assert state_of_thread() == before
