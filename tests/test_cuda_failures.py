"""What the cuda engine does about captures that fail, with a stand-in for torch's part, as far as its source tells."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dsv4_compile.errors import CaptureError
from dsv4_compile.runtime.cuda import CudaEngine


class Allocators:
    """Which pools are recorded to, of the device and of pinned memory, and by how many graphs each is used."""

    def __init__(self) -> None:
        self.device: set[Any] = set()
        self.pinned: set[Any] = set()
        self.uses: Counter[Any] = Counter()
        self.is_invalid = False

    def begin(self, handle: Any) -> None:
        if handle in self.device | self.pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.device.add(handle)
        self.pinned.add(handle)
        self.uses[handle] += 1

    def end_on_device(self, device_index: int, handle: Any) -> None:
        if handle not in self.device:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.device.remove(handle)

    def release(self, device_index: int, handle: Any) -> None:
        self.uses[handle] -= 1


class Graph:
    """A CUDAGraph: an invalid capture ends with an error before the allocators hear of it."""

    allocators: Allocators

    def __init__(self) -> None:
        self._is_captured = False
        self._handle: Any = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.allocators.begin(pool)
        self._handle = pool

    def capture_end(self) -> None:
        if self.allocators.is_invalid or self._is_captured:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.allocators.end_on_device(0, self._handle)
        self.allocators.pinned.remove(self._handle)
        self._is_captured = True

    def replay(self) -> None:
        assert self._is_captured

    def reset(self) -> None:
        if self._is_captured:
            self.allocators.release(0, self._handle)
        self._is_captured = False


class Stream:
    """Takes work in order, as the only one."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def allocators(monkeypatch: pytest.MonkeyPatch) -> Allocators:
    """Instead of those of torch."""
    made = Allocators()
    monkeypatch.setattr(Graph, "allocators", made, raising=False)
    handles = iter(range(1, 1000))
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": lambda device: Stream(),
        "graph_pool_handle": lambda: (0, next(handles)),
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_on_device)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release)
    return made


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
        allocators.is_invalid = False
    second = engine.capture(lambda: None, pool, name="second")
    second.replay()
    assert allocators.device == set()
    assert sorted(allocators.uses.elements()) == [(0, 1), (0, 4)]  # of the refused ones none is left
    for graph in (first, second):
        graph.release()
    assert list(allocators.uses.elements()) == []


def test_a_valid_capture_whose_code_fails_leaves_its_pool_as_it_was(allocators: Allocators) -> None:
    engine = CudaEngine(torch.device("cuda"))
    pool = engine.make_pool()

    def fail() -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        engine.capture(fail, pool, name="failing")
    assert (allocators.device, allocators.pinned, +allocators.uses) == (set(), set(), Counter())
    engine.capture(lambda: None, pool, name="next").replay()
    assert list(allocators.uses.elements()) == [(0, 1)]
