"""Orders the work of all calls of a device, whichever streams the callers are on. It has not run on hardware yet.

Captured graphs share more than their inputs: the workspaces of cuBLAS, which go by thread and stream of the capture;
before torch 2.13 the seeds of generators; the arena and the pool of a compiled graph; the streams of warm-ups. Two
streams that replay without waiting for each other would write them at the same time, and no error would say so. So:

- A call on another stream than the last one waits for the stream of that one. The same stream again costs nothing.
- While a call of another thread goes on, it gives more work to its stream, which no wait of now can cover. A call that
  comes meanwhile on another stream is told so, and runs uncaptured, in memory of its own. It must not wait: the other
  call may run an op that waits for this thread.
- A warm-up or a capture puts work on streams of the engine, so no call of another thread may go on meanwhile.

A stream that others made (`torch.cuda.ExternalStream`) may be destroyed after a call, so an event stands for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from ....compat.cuda import current_stream_number, is_external


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that goes on: of which thread, on which stream, and whether it has to be the only one."""

    thread: int
    number: int
    stream: torch.cuda.Stream
    alone: bool


class CallOrder:
    """See the module docstring; threads share it.

    Args:
        device: the CUDA device, with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.RLock()  # not for holding it twice, but since it says whether this thread holds it
        self._calls: dict[object, _Call] = {}  # in order of their begin
        self._number: int | None = None
        self._stream: torch.cuda.Stream | None = None
        self._may_go = False  # that stream
        self._end: torch.cuda.Event | None = None  # of the last call, if its stream may be destroyed

    def follow(self, call: object, *, alone: bool) -> bool:
        """See `Engine.follow`."""
        try:
            return self._follow(call, alone)
        finally:
            self._let_go()

    def _follow(self, call: object, alone: bool) -> bool:
        number, thread = current_stream_number(self._device.index), threading.get_ident()
        with self._lock:
            for other in self._calls.values():
                if other.thread != thread and (alone or other.alone or other.number != number):
                    return False
            if number != self._number and not self._wait_on(torch.cuda.current_stream(self._device), number):
                return False
            assert self._stream is not None, "that of this call"
            self._calls[call] = _Call(thread, number, self._stream, alone)
        return True

    def leave(self, call: object) -> None:
        """See `Engine.leave`."""
        try:
            self._leave(call)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """An interrupt may come while a block that holds the lock is left."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.release()

    def _leave(self, call: object) -> None:
        """The call goes last, so that one that is interrupted here can leave again."""
        thread = threading.get_ident()
        with self._lock:
            if call not in self._calls:
                return
            if self._may_go and self._stream is not None:
                self._end = self._stream.record_event()
            outer = [other for key, other in self._calls.items() if other.thread == thread and key is not call]
            if outer and outer[-1].number != self._number:
                # a call inside of a call, on another stream: the outer one goes on after it
                self._wait_on(outer[-1].stream, outer[-1].number)
            del self._calls[call]

    def _wait_on(self, stream: torch.cuda.Stream, number: int) -> bool:
        """Have a stream wait for the last call; False if it cannot."""
        if self._end is not None:
            stream.wait_event(self._end)
        elif self._stream is not None:
            with torch.cuda.stream(self._stream):
                if torch.cuda.is_current_stream_capturing():
                    return False  # somebody records there, and whoever waits for it would be recorded too
            stream.wait_stream(self._stream)
        self._stream, self._number, self._end = stream, number, None
        self._may_go = is_external(stream)
        return True
