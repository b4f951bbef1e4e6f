"""The cuda engine orders what a GPU would be free to do in any order: over a stand-in for torch.cuda, on a CPU.

Each scenario is silent wrong numbers on a GPU without the mechanism that is named beside it. It is taken away in turn,
which has to be found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, install
from runtime_helpers import SPLIT_PROBES, Probe
from torch import Tensor

from benchmarks.attention_stack import first_step, mark_request_dims, stack_with, tiny_config
from benchmarks.region import one_step
from benchmarks.toy import SPLIT_OP, Toy
from dsv4_compile import counters
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.runtime import captured
from dsv4_compile.runtime.engines.base import allocate_poisoned
from dsv4_compile.runtime.engines.cuda import engine as cuda_engine
from dsv4_compile.runtime.engines.cuda import streams as cuda_streams
from dsv4_compile.runtime.engines.cuda.call_order import CallOrder
from dsv4_compile.runtime.engines.cuda.engine import CudaEngine
from dsv4_compile.runtime.engines.select import engine_for

probe = torch.ops.probe


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with torch.no_grad():
        yield install(monkeypatch)
    torch._dynamo.reset()
    captured._live.clear()  # a later reset would ask torch itself for their pools


def compiled(model: Any, **options: Any) -> Any:
    options = {"split_ops": [SPLIT_OP, *SPLIT_PROBES], **options}
    return torch.compile(model, backend=dsv4_piecewise, dynamic=True, options=options)


def two_streams(cuda: FakeCuda) -> tuple[Any, Any]:
    """Both after everything so far, and none after the other."""
    streams = cuda.stream(name="A"), cuda.stream(name="B")
    for stream in streams:
        stream.wait_stream(cuda.default)
    return streams


def call_on(cuda: FakeCuda, stream: Any, model: Any, *args: Tensor) -> Tensor:
    with cuda.on(stream):
        result: Tensor = model(*args)
    return result


def other(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(probe.give(torch.mm(x, w)), w)


def kinds(cuda: FakeCuda) -> set[str]:
    return {finding.split()[0] for finding in cuda.findings}


# scenarios: what two streams may do to each other


def one_model(cuda: FakeCuda) -> None:
    """Arena, copied in inputs and pool are those of the bucket."""
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    for _ in range(3):
        model(x)
    for stream in two_streams(cuda):
        call_on(cuda, stream, model, x)


def one_model_in_turn(cuda: FakeCuda) -> None:
    """The caller waits for neither; each call is after the one before it."""
    model, x = compiled(Toy(1)), torch.ones(4, 4)
    a, b = two_streams(cuda)
    for stream in (a, b, a, b, b, a, cuda.default):
        call_on(cuda, stream, model, x)


def two_models(cuda: FakeCuda) -> None:
    """One thread captured both, so they write one workspace of cuBLAS."""
    model, second, x, w = compiled(Toy(2)), compiled(other), torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(3):
        model(x), second(x, w)
    a, b = two_streams(cuda)
    call_on(cuda, a, model, x)
    call_on(cuda, b, second, x, w)


def a_warm_up_beside_a_replay(cuda: FakeCuda) -> None:
    """It has the workspace of the stream that the other model was captured on."""
    model, second, x, w = compiled(Toy(2)), compiled(other), torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(3):
        model(x)
    a, b = two_streams(cuda)
    call_on(cuda, a, model, x)
    call_on(cuda, b, second, x, w)


def a_call_inside_of_a_call(cuda: FakeCuda) -> None:
    """An op of one model calls the other one on a stream of its own; the first goes on afterwards."""
    inner, x, w = compiled(Toy(1)), torch.ones(4, 4), torch.ones(4, 4)
    outer, side = compiled(other), cuda.stream(name="side")
    for _ in range(3):
        inner(x), outer(x, w)
    side.wait_stream(cuda.default)
    with calling("give", lambda: call_on(cuda, side, inner, x)):
        outer(x, w)


def results_of_a_warm_up(cuda: FakeCuda) -> None:
    """They are read on the stream of their caller, and lie in memory of the engine's."""
    first, second = compiled(Toy(2)), compiled(Toy(2))
    a, b = two_streams(cuda)
    y = call_on(cuda, a, first, torch.ones(4, 4))
    with cuda.on(a), cuda.watching():
        y.mul(2)
    del y
    call_on(cuda, b, second, torch.ones(5, 4))


def results_of_a_warm_up_that_go_while_another_runs(cuda: FakeCuda) -> None:
    """Read and freed once the other call is ordered already."""
    first, second, w = compiled(Toy(2)), compiled(other), torch.ones(4, 4)
    a, b = two_streams(cuda)
    kept = [call_on(cuda, a, first, torch.ones(4, 4))]

    def read_and_free() -> None:
        with cuda.on(a), cuda.watching():
            kept.pop().mul(2)

    with calling("give", read_and_free):
        call_on(cuda, b, second, torch.ones(5, 4), w)


def an_arena_that_goes(cuda: FakeCuda) -> None:
    """Its last replay was not on the stream that it was captured from, where its memory would go."""
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    a, b = two_streams(cuda)
    for stream in (a, a, b):
        call_on(cuda, stream, model, x)
    torch._dynamo.reset()
    with cuda.on(a), cuda.watching():
        kept = [torch.ones(4, 4) for _ in range(8)]
    call_on(cuda, a, compiled(Toy(1)), x)
    del kept


def workspaces_that_are_cleared(cuda: FakeCuda) -> None:
    """As torch's own graphs do; ours go on writing there."""
    model, second, x, w = compiled(Toy(2)), compiled(other), torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(3):
        model(x)
    torch._C._cuda_clearCublasWorkspaces()
    for _ in range(3):
        model(x), second(x, w)


# mechanisms, and how to do without


def _follow_without_waiting(self: CallOrder, call: object, *, alone: bool) -> bool:
    return True


def _allocate_where_the_caller_is(self: CudaEngine, nbytes: int, device: torch.device) -> Tensor:
    return allocate_poisoned(nbytes, device)


MUTATIONS: dict[str, tuple[object, str, object]] = {
    "order of calls": (CallOrder, "follow", _follow_without_waiting),
    "return to the outer call": (CallOrder, "leave", lambda self, call: self._calls.pop(call, None)),
    "recorded results": (cuda_engine, "record_use", lambda tensor, stream: None),
    "arenas on a stream of ours": (CudaEngine, "allocate", _allocate_where_the_caller_is),
    "workspaces in a pool": (torch.cuda, "use_mem_pool", lambda pool, device: contextmanager(lambda: iter([None]))()),
    "workspaces before a warm-up": (cuda_streams.SideStreams, "prepare_blas", lambda self, main, count: None),
}
NEEDS: list[tuple[Callable[[FakeCuda], None], tuple[str, ...], str]] = [
    (one_model, ("order of calls",), "RACE"),
    (one_model_in_turn, ("order of calls",), "RACE"),
    (two_models, ("order of calls",), "RACE"),
    (a_warm_up_beside_a_replay, ("order of calls",), "RACE"),
    (a_call_inside_of_a_call, ("return to the outer call",), "RACE"),
    (results_of_a_warm_up, ("order of calls", "recorded results"), "REUSE"),
    (results_of_a_warm_up_that_go_while_another_runs, ("recorded results",), "REUSE"),
    (an_arena_that_goes, ("arenas on a stream of ours",), "REUSE"),
    (workspaces_that_are_cleared, ("workspaces in a pool",), "REUSE"),
    (workspaces_that_are_cleared, ("workspaces before a warm-up",), "REUSE"),
]
SCENARIOS = list(dict.fromkeys(scenario for scenario, _, _ in NEEDS))


@contextmanager
def calling(op: str, function: Callable[[], object]) -> Iterator[None]:
    """Have an op call a function, once."""
    left = [function]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "called", staticmethod(lambda name: left.pop()() if name == op and left else None))
        yield
    assert left == [], "it was not called"


def test_calls_on_one_stream_need_nothing(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallOrder, "follow", _follow_without_waiting)
    monkeypatch.setattr(CallOrder, "leave", lambda self, call: None)
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    with counters.expect(captures=1, replays=4):
        for _ in range(5):
            model(x)
    assert (cuda.findings, cuda.replays) == ([], 4 * 3)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_two_streams_are_ordered(scenario: Callable[[FakeCuda], None], cuda: FakeCuda) -> None:
    scenario(cuda)
    assert cuda.findings == []


@pytest.mark.parametrize(("scenario", "gone", "kind"), NEEDS, ids=[f"{s.__name__}, {m[0]}" for s, m, _ in NEEDS])
def test_without_its_mechanism_it_is_found(
    scenario: Callable[[FakeCuda], None],
    gone: tuple[str, ...],
    kind: str,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in gone:
        owner, attribute, without = MUTATIONS[name]
        monkeypatch.setattr(owner, attribute, without)
        if name == "order of calls":
            monkeypatch.setattr(CallOrder, "leave", lambda self, call: None)
    scenario(cuda)
    assert kind in kinds(cuda)


# threads: while one is in the middle of a call, another one calls


def in_the_middle_of_a_call(cuda: FakeCuda, stream: Any, then: Callable[[], None]) -> None:
    """A call on a stream, in the middle of which another thread does something."""
    model, x, w = compiled(other), torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(3):
        call_on(cuda, stream, model, x, w)
    failures: list[BaseException] = []

    @torch.no_grad()
    def run() -> None:
        try:
            then()
        except BaseException as failure:
            failures.append(failure)

    def in_thread() -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    with calling("give", in_thread):
        call_on(cuda, stream, model, x, w)
    assert failures == []


def test_a_thread_on_another_stream_runs_uncaptured_meanwhile(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    for _ in range(3):
        model(x)
    a, b = two_streams(cuda)

    def call() -> None:
        with counters.expect(uncaptured_calls=2, replays=0):
            for _ in range(2):
                call_on(cuda, b, model, x)

    in_the_middle_of_a_call(cuda, a, call)
    assert cuda.findings == []
    assert [r.message[:20] for r in caplog.records] == ["calls run uncaptured"]
    with counters.expect(replays=1):
        call_on(cuda, b, model, x)
    assert cuda.findings == []


def test_that_thread_would_race(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallOrder, "follow", lambda self, call, alone: self._calls.setdefault(call, None) is None)
    monkeypatch.setattr(CallOrder, "leave", lambda self, call: self._calls.pop(call, None))
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    for _ in range(3):
        model(x)
    a, b = two_streams(cuda)
    in_the_middle_of_a_call(cuda, a, lambda: call_on(cuda, b, model, x))
    assert kinds(cuda) == {"RACE"}


def test_a_thread_on_the_same_stream_replays_meanwhile_and_warms_up_later(cuda: FakeCuda) -> None:
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    for _ in range(3):
        model(x)
    a, _ = two_streams(cuda)

    def call() -> None:
        with counters.expect(replays=1, captures=0, uncaptured_calls=3):
            call_on(cuda, a, model, x)
            for _ in range(3):
                call_on(cuda, a, model, torch.ones(5, 4))  # a new bucket is not warm after any of them

    in_the_middle_of_a_call(cuda, a, call)
    with counters.expect(replays=1, captures=1, uncaptured_calls=1):
        for _ in range(2):
            call_on(cuda, a, model, torch.ones(5, 4))
    assert cuda.findings == []


def test_a_call_that_fails_is_over(cuda: FakeCuda) -> None:
    model, x, w = compiled(other), torch.ones(4, 4), torch.ones(4, 4)

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    for _ in range(4):  # in the warm-up, the capture, and replays
        with calling("give", fail), pytest.raises(ZeroDivisionError):
            model(x, w)
        model(x, w)
    a, b = two_streams(cuda)
    with counters.expect(uncaptured_calls=0):
        for stream in (a, b):
            call_on(cuda, stream, model, x, w)
    assert cuda.findings == []


# streams that a wait cannot be for


def test_a_stream_that_somebody_records_on_is_not_waited_for(cuda: FakeCuda) -> None:
    """Whoever waits for it would be recorded as well."""
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    a, b = two_streams(cuda)
    for _ in range(3):
        call_on(cuda, a, model, x)
    graph = cuda.graph()
    with cuda.on(a):
        graph.capture_begin(pool=(0, 0), capture_error_mode="global")
    with counters.expect(uncaptured_calls=1, replays=0):
        call_on(cuda, b, model, x)
    assert set(cuda.capturing) == {a}
    with cuda.on(a):
        graph.capture_end()
    with counters.expect(uncaptured_calls=0, replays=1):
        call_on(cuda, b, model, x)
    assert cuda.findings == []


def test_a_stream_of_others_may_be_destroyed_after_a_call(cuda: FakeCuda) -> None:
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    a, b = two_streams(cuda)
    a.stream_id = 1 << 40  # an address
    for _ in range(3):
        call_on(cuda, a, model, x)
    a.is_destroyed = True
    call_on(cuda, b, model, x)
    assert cuda.findings == []


# whole pieces


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_pieces_of_attention_on_side_streams_are_ordered(compiler: str, cuda: FakeCuda) -> None:
    stack, _ = stack_with(tiny_config((4, 4, 128, 0)), 8, "cpu")
    inputs = torch.zeros(8, dtype=torch.long), torch.arange(8), mark_request_dims(first_step(8))
    options = {"runner": "mrv2", "aux_streams": 3, "piece_compiler": compiler}
    step = one_step(compiled(stack, **options), inputs, renews=False)
    with counters.expect(captures=1, replays=3):
        for _ in range(4):
            step()
    assert cuda.findings == []
    assert cuda.most_streams == 5  # where the capture begins, that of the work, and three beside it


# the stand-in itself


def capture(run: Callable[[], object]) -> None:
    engine = engine_for("host", torch.device("cpu"))
    engine.capture(run, engine.make_pool(), name="one")


def test_the_stand_in_finds_a_stream_that_is_not_joined(cuda: FakeCuda) -> None:
    side, x = cuda.stream(name="side"), torch.ones(4)

    def fork() -> None:
        side.wait_stream(cuda.current)
        with cuda.on(side):
            x.add_(1)

    with cuda.watching():
        capture(fork)
    assert cuda.findings == ["UNJOINED side at the end of a capture"]


def test_the_stand_in_finds_a_capture_that_waits_for_work_outside(cuda: FakeCuda) -> None:
    outside, x = cuda.stream(name="outside"), torch.ones(4)
    with cuda.watching():
        capture(lambda: (cuda.current.wait_stream(outside), x.add_(1)))
    assert kinds(cuda) == {"UNCAPTURED"}


def test_the_stand_in_finds_streams_of_a_capture_that_race(cuda: FakeCuda) -> None:
    side, x = cuda.stream(name="side"), torch.ones(4)

    def fork_and_join() -> None:
        side.wait_stream(cuda.current)
        with cuda.on(side):
            x.add_(1)
        x.mul_(2)
        cuda.current.wait_stream(side)

    with cuda.watching():
        capture(fork_and_join)
    assert kinds(cuda) == {"RACE"}


def test_the_stand_in_finds_memory_that_another_stream_still_uses(cuda: FakeCuda) -> None:
    a, b = two_streams(cuda)
    with cuda.watching(), cuda.on(a):
        x = torch.ones(4)
        b.wait_stream(a)
        with cuda.on(b):
            y = x + 1
        del x
        again = torch.ones(4)
    assert kinds(cuda) == {"REUSE"}
    del y, again
