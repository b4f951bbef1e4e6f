"""The engine for CUDA inputs, over `torch.cuda.CUDAGraph`. It has not run on hardware yet.

What it takes care of, each learnt by others the hard way:

- One capture stream for all pieces of a device, and warm-up on that stream: what a library allocates per stream on
  first use (cuBLAS workspaces) is then there before a capture, once and not in a graph's pool.
- `thread_local` capture mode: another thread's CUDA call does not invalidate the capture.
- Garbage collection paused and autocast's cache off while capturing (`capture_state`).
- Memory that outlives a capture (`allocate`) comes from outside any pool.
- Each capture forks from and joins the caller's stream through events of its own, made by `wait_stream`. Streams that
  the recorded code forks itself it has to join itself; CUDA refuses the capture otherwise.
- No warm-up while another thread captures: it would run on the streams that are being captured, and become part of
  somebody else's graph.
- The default generator of the device is registered with every graph by torch; a generator of the user's has to be put
  into `generators` before a piece that draws from it is captured.
- A capture that CUDA has found invalid (a value was read back to the host) cannot be ended, and torch's allocators go
  on recording to its pool: the one of the device is told to stop, the one of pinned memory cannot be. So later captures
  get another pool, and the graph is kept, which that allocator asks whether it records.
- No synchronisation, garbage collection or emptying of caches per capture: with a hundred pieces in each of dozens
  of buckets that took longer than the captures.

Left to the caller: capture the largest bucket first; replay right after capture, since a graph's outputs hold nothing
before; release the recordings before a process group is destroyed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat import stop_recording_to_pool
from ..errors import CaptureError
from .capture_state import no_capture_elsewhere, offering, recording
from .cuda_lanes import SideStreams
from .engine import ALIGNMENT, Recording, allocate_poisoned
from .user_line import line_of


@dataclass
class CudaPool:
    """A graph memory pool of torch; its memory is freed with the last graph that uses it.

    Attributes:
        handle: of the pool that the next capture uses.
    """

    handle: Any


class CudaEngine:
    """See `engine.Engine`. Threads may share it: captures exclude each other.

    Args:
        device: the CUDA device; without an index, the current one.

    Attributes:
        generators: the user's generators that captured work draws from.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.generators: list[torch.Generator] = []
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._side_streams = SideStreams(self._device)
        self._invalid: list[torch.cuda.CUDAGraph] = []

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See `Engine.allocate`."""
        memory = allocate_poisoned(nbytes, device)
        assert memory.data_ptr() % ALIGNMENT == 0, "torch aligns CUDA memory to 512 bytes"
        return memory

    def make_pool(self) -> CudaPool:
        """See `Engine.make_pool`."""
        return CudaPool(torch.cuda.graph_pool_handle())

    def warm_up(self, run: Callable[[], None], *, lanes: int = 0) -> None:
        """See `Engine.warm_up`."""
        with no_capture_elsewhere(), self._on_stream(), offering(self._side_streams.lanes(self._stream, lanes)):
            run()

    def capture(self, run: Callable[[], None], pool: CudaPool, *, name: str, lanes: int = 0) -> Recording:
        """See `Engine.capture`."""
        with recording(name), self._on_stream(), offering(self._side_streams.lanes(self._stream, lanes)):
            graph = torch.cuda.CUDAGraph()
            for generator in self.generators:
                graph.register_generator_state(generator)
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                run()
                graph.capture_end()
            except BaseException as error:
                self._abandon(graph, pool)
                if isinstance(error, RuntimeError) and "captur" in str(error):
                    raise _refusal(name, error) from error
                raise
        return CudaRecording(name, graph)

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        """End a capture that failed; see the module docstring for one that is invalid."""
        try:
            graph.capture_end()
        except RuntimeError:  # it is invalid or at its end; the first error counts
            stop_recording_to_pool(self._device.index, pool.handle)
            pool.handle = torch.cuda.graph_pool_handle()
            self._invalid.append(graph)
        graph.reset()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Make the capture stream current, after the caller's work so far and before the caller's next."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


class CudaRecording(Recording):
    """A recording whose replay is one graph launch on the current stream."""

    def __init__(self, name: str, graph: torch.cuda.CUDAGraph) -> None:
        super().__init__(name, [graph.replay], [graph])
        self._graph = graph

    def release(self) -> None:
        """See `Captured.release`."""
        super().release()
        self._graph.reset()


def _refusal(name: str, error: RuntimeError) -> CaptureError:
    return CaptureError(
        f"CUDA refused the graph of {name} ({line_of(error)}): {error}. Usual causes: a value read back to the host, "
        "an error that the recorded code swallowed, a stream that was forked and not joined. Move what does it into "
        "an op that is registered as a split op."
    )
