"""Lanes of the CUDA engine: streams, and events that are made anew for each use. It has not run on hardware yet.

An event that two graphs share orders neither, so none is kept. Streams are: what a library allocates per stream is then
there after the warm-up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class SideStreams:
    """The side streams of one device, made when first asked for.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        self._making = threading.Lock()

    def lanes(self, main: torch.cuda.Stream, count: int) -> CudaLanes | None:
        """Lane 0 on a stream and `count` side lanes on streams of their own; None without side lanes."""
        return CudaLanes((main, *self._first(count))) if count else None

    def prepare_blas(self, main: torch.cuda.Stream, count: int) -> None:
        """Have cuBLAS make what it keeps for this thread and these streams, which it cannot in a capture."""
        for stream in (main, *self._first(count)):
            with torch.cuda.stream(stream):
                torch.cuda.current_blas_handle()

    def _first(self, count: int) -> list[torch.cuda.Stream]:
        with self._making:
            while len(self._streams) < count:
                self._streams.append(torch.cuda.Stream(self._device))
            return self._streams[:count]


class CudaLanes:
    """See `capture_state.Lanes`: streams, and a new event for each record.

    Args:
        streams: that of lane 0, then those of the side lanes.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        """See `Lanes.on`."""
        with torch.cuda.stream(self._streams[lane]):
            yield

    def record(self, lane: int) -> torch.cuda.Event:
        """See `Lanes.record`."""
        event = torch.cuda.Event()
        event.record(self._streams[lane])
        return event

    def wait(self, lane: int, event: object) -> None:
        """See `Lanes.wait`."""
        assert isinstance(event, torch.cuda.Event), "an event of `record`"
        self._streams[lane].wait_event(event)
