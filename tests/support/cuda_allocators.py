"""Stand-ins for the allocators, streams and graphs of `torch.cuda`: which pools are recorded to, and by whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from fake_cuda import hide_bindings


class Allocators:
    """Which pools are recorded to, of the device and of pinned memory, and by how many graphs each is used.

    Attributes:
        is_invalid: whether CUDA has found the capture invalid.
        ends_invalid: whether the end of an invalid capture ends the capture to its pool, as since torch 2.13.
        reset_undoes: whether the reset of a graph undoes what its capture left behind, as since torch 2.14.
        active: captures that have begun and not ended.
        workspaces: of cuBLAS, by stream.
        generators_capture: whether generators refuse to draw outside of a capture (before torch 2.13).
        modes: whether inference mode was on when a capture began, or a generator was registered.
        is_full: whether torch has cached what a capture needs.
        is_cache_locked: whether emptying the cache gives nothing back.
        emptied: how often the cache was emptied.
    """

    def __init__(self, *, ends_invalid: bool, reset_undoes: bool) -> None:
        self.device: set[Any] = set()
        self.pinned: set[Any] = set()
        self.uses: Counter[Any] = Counter()
        self.is_invalid = False
        self.ends_invalid = ends_invalid
        self.reset_undoes = reset_undoes
        self.active = 0
        self.workspaces: set[Stream] = set()
        self.generators_capture = False
        self.modes: set[bool] = set()
        self.is_full = False
        self.is_cache_locked = False
        self.emptied = 0

    def empty_cache(self) -> None:
        assert not self.active, "torch gives nothing back while anything is captured"
        self.emptied += 1
        self.is_full = self.is_full and self.is_cache_locked

    def allocate(self) -> None:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    def begin(self, handle: Any) -> None:
        if handle in self.device | self.pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self.uses.get(handle) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED, please report a bug to PyTorch")
        self.device.add(handle)
        self.pinned.add(handle)
        self.uses[handle] += 1

    def end(self, handle: Any) -> None:
        self.end_on_device(0, handle)
        self.pinned.remove(handle)

    def end_on_device(self, device_index: int, handle: Any) -> None:
        if handle not in self.device:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.device.remove(handle)

    def release(self, device_index: int, handle: Any) -> None:
        self.uses[handle] -= 1
        assert self.uses[handle] >= 0, "uc >= 0 INTERNAL ASSERT FAILED"


class Stream:
    """Takes work in order; joins a capture by waiting for a stream of it."""

    current: Stream
    capturing: set[Stream]
    waits: list[tuple[Stream, Stream]]

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        self.waits.append((self, other))
        if other in self.capturing:
            self.capturing.add(self)


class Graph:
    """A CUDAGraph."""

    allocators: Allocators
    fails_to_begin = False
    fails_to_end = 0

    def __init__(self) -> None:
        self._is_captured = False
        self._handle: Any = None
        self._stream = Stream.current

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.allocators.modes.add(torch.is_inference_mode_enabled())
        self.allocators.begin(pool)
        self._handle, self._stream = pool, Stream.current
        Stream.capturing.add(self._stream)
        self.allocators.active += 1
        self.allocators.generators_capture = not self.allocators.ends_invalid
        if self.fails_to_begin:
            self.allocators.active -= 1
            Stream.capturing.clear()
            raise torch.OutOfMemoryError("no memory for the state of a generator")

    def capture_end(self) -> None:
        assert Stream.current is self._stream, "Capture must end on the same stream it began on."
        if not self.allocators.active:
            raise RuntimeError("markCaptureEnd called with no captures in progress")
        self.allocators.active -= 1
        Stream.capturing.clear()
        is_invalid, self.allocators.is_invalid = self.allocators.is_invalid, False
        if not is_invalid or self.allocators.ends_invalid:
            self.allocators.end(self._handle)
        if is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        if self.fails_to_end:
            type(self).fails_to_end -= 1
            raise RuntimeError("CUDA error: out of memory")
        self._is_captured, self.allocators.generators_capture = True, False

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.allocators.modes.add(torch.is_inference_mode_enabled())

    def replay(self) -> None:
        assert self._is_captured

    def reset(self) -> None:
        if self._is_captured:
            self.allocators.workspaces.discard(self._stream)
        if self._is_captured or (self.allocators.reset_undoes and self._handle is not None):
            if self._handle in self.allocators.device and not self._is_captured:
                self.allocators.end(self._handle)
            self.allocators.release(0, self._handle)
        self._is_captured, self._handle = False, None

    def __del__(self) -> None:
        if self._handle is not None:
            self.reset()


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


@pytest.fixture(params=[(False, False), (True, False), (True, True)], ids=["torch 2.11", "torch 2.13", "torch 2.14"])
def allocators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Allocators:
    """Instead of those of torch."""
    made = Allocators(ends_invalid=request.param[0], reset_undoes=request.param[1])
    hide_bindings(monkeypatch)
    monkeypatch.setattr(Graph, "allocators", made, raising=False)
    monkeypatch.setattr(Stream, "current", Stream(), raising=False)
    monkeypatch.setattr(Stream, "capturing", set(), raising=False)
    monkeypatch.setattr(Stream, "waits", [], raising=False)
    handles = iter(range(1, 1000))

    def blas_handle() -> int:
        assert not Stream.capturing, "cublasCreate allocates memory, which a capture does not permit"
        made.workspaces.add(Stream.current)
        return 1

    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": lambda device: Stream.current,
        "current_blas_handle": blas_handle,
        "graph_pool_handle": lambda: (0, next(handles)),
        "stream": on_stream,
        "device": lambda device: nullcontext(),
        "MemPool": object,
        "use_mem_pool": lambda pool, device: nullcontext(),
        "empty_cache": made.empty_cache,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_on_device)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release)
    return made
