"""Streams of the CUDA engine: streams, and events that are made anew for each use. It has not run on hardware yet.

An event that two graphs share orders neither, so none is kept. Streams are: what a library allocates per stream is then
there after the warm-up.

Workspaces of cuBLAS come from a pool of their own. Graphs write them for as long as they live, but whoever calls
`torch._C._cuda_clearCublasWorkspaces()` frees those of all streams; torch's own graphs do, around each warm-up and
capture of `mode="reduce-overhead"`. Out of that pool nobody but the next workspace of the same stream can get them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ....compat.cuda import own_stream


class SideStreams:
    """The side streams of one device, made when first asked for, and what cuBLAS keeps for them.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._workspaces = torch.cuda.MemPool()
        self._streams: list[torch.cuda.Stream] = []
        self._making = threading.Lock()

    def streams(self, main: torch.cuda.Stream, count: int) -> CudaStreams | None:
        """Stream 0 on a stream and `count` side streams on streams of their own; None without side streams."""
        return CudaStreams((main, *self._first(count))) if count else None

    def prepare_blas(self, main: torch.cuda.Stream, count: int) -> None:
        """Have cuBLAS make what it keeps for this thread and these streams, which it cannot in a capture.

        For a caller that keeps captures and other calls of this from running meanwhile.
        """
        with torch.cuda.use_mem_pool(self._workspaces, self._device):
            for stream in (main, *self._first(count)):
                with torch.cuda.stream(stream):
                    torch.cuda.current_blas_handle()

    def _first(self, count: int) -> list[torch.cuda.Stream]:
        with self._making:
            while len(self._streams) < count:
                self._streams.append(own_stream(self._device))
            return self._streams[:count]


class CudaStreams:
    """See `capture_state.Streams`: streams, and a new event for each record.

    Args:
        streams: that of stream 0, then those of the side streams.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """See `Streams.on`."""
        with torch.cuda.stream(self._streams[stream]):
            yield

    def record(self, stream: int) -> torch.cuda.Event:
        """See `Streams.record`."""
        event = torch.cuda.Event()
        event.record(self._streams[stream])
        return event

    def wait(self, stream: int, event: object) -> None:
        """See `Streams.wait`."""
        assert isinstance(event, torch.cuda.Event), "an event of `record`"
        self._streams[stream].wait_event(event)
