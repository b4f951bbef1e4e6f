"""What the cuda engine does about captures that fail and graphs that go, with a stand-in for torch's part."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_allocators import Allocators, Graph, Stream
from cuda_allocators import allocators as allocators  # a fixture

from dsv4_compile.errors import CaptureError
from dsv4_compile.runtime.engines.cuda.engine import CudaEngine


def test_after_an_invalid_capture_the_next_one_of_its_pool_works(allocators: Allocators) -> None:
    engine = CudaEngine(torch.device("cuda"))
    pool = engine.make_pool()
    first = engine.capture(lambda: None, pool, name="first")

    def read_back() -> None:
        allocators.is_invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")

    for _ in range(3):
        with pytest.raises(CaptureError, match="not permitted"):
            engine.capture(read_back, pool, name="refused")
        assert not allocators.generators_capture
    second = engine.capture(lambda: None, pool, name="second")
    second.replay()
    assert (allocators.device, allocators.active) == (set(), 0)
    # torch 2.13 never gives up the use of a pool by a capture that was refused
    refused = 3 if allocators.ends_invalid and not allocators.reset_undoes else 0
    assert allocators.uses.total() == 2 + refused
    for graph in (first, second):
        graph.release()
    assert allocators.uses.total() == refused


def test_a_capture_that_is_found_invalid_at_its_end_is_ended_once(allocators: Allocators) -> None:
    """A second end would be one too many for the count of captures on the device, which other threads share."""
    engine = CudaEngine(torch.device("cuda"))

    def swallow() -> None:
        allocators.is_invalid = True

    allocators.active = 1  # of somebody else
    with pytest.raises(CaptureError, match="previous error"):
        engine.capture(swallow, engine.make_pool(), name="swallowing")
    assert allocators.active == 1


def test_a_valid_capture_whose_code_fails_leaves_nothing(allocators: Allocators) -> None:
    engine = CudaEngine(torch.device("cuda"))
    pool = engine.make_pool()

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        engine.capture(fail, pool, name="failing")
    assert (allocators.device, allocators.pinned, +allocators.uses) == (set(), set(), Counter())
    made = engine.capture(lambda: None, pool, name="next")
    made.replay()
    assert allocators.uses.total() == 1


def test_a_capture_inside_of_another_is_refused_in_our_words(allocators: Allocators) -> None:
    """CUDA has nothing to do with it, though the message speaks of a capture."""
    engine = CudaEngine(torch.device("cuda"))
    pool = engine.make_pool()

    def nest() -> None:
        engine.capture(lambda: None, pool, name="the inner one")

    with pytest.raises(CaptureError, match=r"^cannot capture the inner one: this thread is recording the outer one"):
        engine.capture(nest, pool, name="the outer one")


def test_a_capture_that_fails_to_begin_leaves_nothing(allocators: Allocators, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CudaEngine(torch.device("cuda"))
    pool = engine.make_pool()
    with monkeypatch.context() as context:
        context.setattr(Graph, "fails_to_begin", True)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            engine.capture(lambda: None, pool, name="failing")
    assert (allocators.device, Stream.capturing, allocators.active, +allocators.uses) == (set(), set(), 0, Counter())
    engine.capture(lambda: None, pool, name="next").replay()


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "dropped"])
def test_a_pool_whose_graphs_are_all_gone_takes_another_one(allocators: Allocators, is_released: bool) -> None:
    engine = CudaEngine(torch.device("cuda"))
    pool = engine.make_pool()
    for name in ("first", "second", "third"):
        graphs = [engine.capture(lambda: None, pool, name=name) for _ in range(2)]
        assert len(+allocators.uses) == 1, "graphs of a pool share it"
        graphs[-1].replay()
        if is_released:
            for graph in graphs:
                graph.release()
        else:
            graphs.clear()
        assert not +allocators.uses


def test_a_graph_that_goes_leaves_the_workspaces_of_others(allocators: Allocators) -> None:
    engine = CudaEngine(torch.device("cuda"))
    pool = engine.make_pool()
    used: list[Stream] = []
    kept, gone = (engine.capture(lambda: used.append(Stream.current), pool, name=name) for name in ("kept", "gone"))
    gone.release()
    assert set(used) <= allocators.workspaces
    kept.replay()


def test_a_capture_begins_behind_the_work_of_the_caller_and_ends_before_more_of_it(allocators: Allocators) -> None:
    """To begin, torch writes seeds that a replay of the caller's may still read."""
    engine, caller = CudaEngine(torch.device("cuda")), Stream.current
    engine.capture(lambda: None, engine.make_pool(), name="one")
    (origin, first), *_, (last, waited_for) = Stream.waits
    assert (first, last, waited_for) == (caller, caller, origin)


def test_blas_is_ready_on_every_stream_before_a_capture(allocators: Allocators) -> None:
    engine = CudaEngine(torch.device("cuda"))
    engine.capture(lambda: None, engine.make_pool(), name="one", streams=3)
    assert len(allocators.workspaces) == 4


def test_a_capture_begins_outside_of_inference_mode(allocators: Allocators) -> None:
    """What a generator keeps for graphs is made then, and a later capture or replay writes it in any mode."""
    engine = CudaEngine(torch.device("cuda"))
    engine.generators.append(torch.Generator())
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        seen: list[bool] = []
        with mode():
            engine.capture(lambda: seen.append(torch.is_inference_mode_enabled()), engine.make_pool(), name="one")  # noqa: B023
            assert seen == [torch.is_inference_mode_enabled()]  # what is recorded runs in the caller's mode
    assert allocators.modes == {False}


def test_a_generator_is_freed_outside_of_inference_mode(allocators: Allocators) -> None:
    engine = CudaEngine(torch.device("cuda"))

    def read_back() -> None:
        allocators.is_invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with torch.inference_mode(), pytest.raises(CaptureError, match="not permitted"):
        engine.capture(read_back, engine.make_pool(), name="refused")
    assert allocators.modes == {False}


# a replay, and streams


def test_a_replay_is_the_launch_and_nothing_of_python(allocators: Allocators, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own method of that name asks for a debugging aid first."""

    class WithAid(Graph):
        def replay(self) -> None:
            raise AssertionError("on the way to the launch")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", WithAid)
    engine = CudaEngine(torch.device("cuda"))
    graph = engine.capture(lambda: None, engine.make_pool(), name="one")
    before = graph.replay
    graph.replay()
    graph.release()
    for replay in (before, graph.replay):
        with pytest.raises(CaptureError, match="one was replayed after its release"):
            replay()


class Driver:
    """Of `cuda.bindings`."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, status: int) -> None:
        self.made: list[int] = []
        self._status = status

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:  # noqa: N802
        assert flags == 1, "the legacy default stream would wait for it"
        self.made.append(1024 + 16 * len(self.made))
        return self._status, self.made[-1]


@pytest.mark.parametrize(("status", "hip"), [(0, None), (2, None), (0, "6.4")], ids=["made", "refused", "ROCm"])
def test_streams_are_made_past_torch_where_that_can_be(
    status: int, hip: str | None, allocators: Allocators, monkeypatch: pytest.MonkeyPatch
) -> None:
    class External(Stream):
        def __init__(self, address: int, device: Any) -> None:
            self.address = address

    driver = Driver(status)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "ExternalStream", External)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    for package in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    engine = CudaEngine(torch.device("cuda"))
    engine.capture(lambda: None, engine.make_pool(), name="one", streams=3)
    streams = [engine._origin, engine._stream, *engine._side_streams._streams]
    if status == 0 and hip is None:
        assert [stream.address for stream in streams] == driver.made  # type: ignore[attr-defined]
    else:
        assert {type(stream) for stream in streams} == {Stream}
    assert len(driver.made) == (0 if hip else 5)


# no memory left


def allocating(allocators: Allocators, calls: list[int]) -> None:
    calls.append(allocators.active)
    allocators.allocate()


def test_a_capture_that_runs_out_of_memory_is_made_again_without_the_cache(
    allocators: Allocators, caplog: pytest.LogCaptureFixture
) -> None:
    engine, calls = CudaEngine(torch.device("cuda")), []
    pool = engine.make_pool()
    engine.capture(partial(allocating, allocators, calls), pool, name="first")
    allocators.is_full = True
    graph = engine.capture(partial(allocating, allocators, calls), pool, name="piece_3 of graph 0")
    graph.replay()
    assert (calls, allocators.emptied) == ([1, 1, 1], 1)
    assert (allocators.device, allocators.active) == (set(), 0)
    assert [record.message for record in caplog.records] == [
        "no memory for piece_3 of graph 0: it is tried once more, with torch's cache emptied"
    ]


def test_a_capture_that_runs_out_of_memory_twice_fails(allocators: Allocators) -> None:
    engine, calls = CudaEngine(torch.device("cuda")), []
    pool = engine.make_pool()
    allocators.is_full = allocators.is_cache_locked = True
    for emptied in (1, 2):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 MiB"):
            engine.capture(partial(allocating, allocators, calls), pool, name="one")
        assert allocators.emptied == emptied
    assert (allocators.device, allocators.active, +allocators.uses) == (set(), 0, Counter())
    allocators.is_full = False
    engine.capture(partial(allocating, allocators, calls), pool, name="one").replay()
    assert (calls, allocators.emptied) == ([1] * 5, 2)


def test_memory_that_a_failed_capture_held_is_free_when_it_is_made_again(allocators: Allocators) -> None:
    """An error keeps the frames it came through alive, and what they refer to."""
    engine, alive = CudaEngine(torch.device("cuda")), []

    class Temporary:
        pass

    def run() -> None:
        temporary = Temporary()
        assert all(reference() is None for reference in alive)
        alive.append(weakref.ref(temporary))
        allocators.allocate()

    allocators.is_full = True
    engine.capture(run, engine.make_pool(), name="one")
    assert len(alive) == 2


@pytest.mark.parametrize("times", [1, 9])
def test_a_graph_that_cuda_has_no_memory_for_is_made_again(
    times: int, allocators: Allocators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA makes it at the end of the capture, and says so in words of its own."""
    engine = CudaEngine(torch.device("cuda"))
    pool = engine.make_pool()
    monkeypatch.setattr(Graph, "fails_to_end", times)
    if times == 1:
        engine.capture(lambda: None, pool, name="one").replay()
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.capture(lambda: None, pool, name="one")
    assert (allocators.emptied, allocators.device, allocators.active) == (1, set(), 0)


def test_another_error_is_no_reason_to_capture_again(allocators: Allocators) -> None:
    engine, calls = CudaEngine(torch.device("cuda")), []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        engine.capture(fail, engine.make_pool(), name="one")
    assert (calls, allocators.emptied) == ([1], 0)


def test_a_workspace_that_cublas_has_no_memory_for_is_tried_again(
    allocators: Allocators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made in a pool, which torch gives nothing of what it has cached elsewhere."""
    engine = CudaEngine(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", allocators.allocate)
    for call in (engine.warm_up, partial(engine.capture, pool=engine.make_pool(), name="one")):
        allocators.is_full = True
        call(lambda: None)
    assert allocators.emptied == 2
