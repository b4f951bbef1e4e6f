"""What this thread records, who has to be told of it, which streams it may use, and what surrounds each capture.

One process-wide lock serialises captures, and what must not run beside one: a second thread that wants to capture waits
until the first is done. A thread that already records is refused: a graph cannot hold another one. Replays take no
lock.

While a capture runs, garbage collection is paused (a finaliser would run its kernels into the capture, and freeing
memory invalidates a CUDA capture), autocast's cache of cast weights is off (a cast that was recorded holds no value
yet, and one made before is freed by the end of its autocast block), and grad mode is off. All of it goes back to what
it was, however the capture ends.

Note "gaps of a block": an interrupt may come while a `with` block is entered or left, by Ctrl-C or from any signal
handler. Then what the block pushed stays. So whoever serves a call does it through `restoring`, which puts back what
the thread had before, and does so twice, since the interrupt may come there too.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ...compat.thread_state import TorchState

Result = TypeVar("Result")
# Held again by the thread that holds it: an op of a piece that warms up may call a compiled function of its own.
_capture_lock = threading.RLock()


class OpaqueRecorder(Protocol):
    """An engine that has to be told of functions whose kernels do not go through torch's dispatcher."""

    def record_function(
        self,
        name: str,
        function: Callable[..., object],
        args: Sequence[object],
        written: Sequence[bool],
        returns: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Record a call of `function`, as one launch, without calling it; see `launch`."""


class Streams(Protocol):
    """What an engine offers to what runs in a capture or its warm-up: streams whose work is ordered by events alone.

    Stream 0 is where everything runs that is not told otherwise. A side stream is forked from it by a first wait, and
    has to be joined into it by a last one.
    """

    def on(self, stream: int) -> AbstractContextManager[None]:
        """Give the work of a block to a stream."""

    def record(self, stream: int) -> object:
        """A new event for all the work that a stream was given so far."""

    def wait(self, stream: int, event: object) -> None:
        """Let a stream wait for an event before its next work."""


class _Recorded(threading.local):
    """What this thread records, who has to be told of opaque functions, and the streams it may use."""

    name: str | None = None
    recorder: OpaqueRecorder | None = None
    streams: Streams | None = None
    paused_gc: bool = False  # by this thread, which has to let it go on


_recorded = _Recorded()


def is_capturing() -> bool:
    """True in the thread that records a graph, while it does: through this package, or by torch on a CUDA stream."""
    if _recorded.name is not None:
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def launch(
    name: str,
    function: Callable[..., object],
    args: Sequence[object],
    written: Sequence[bool],
    returns: Sequence[Tensor],
) -> object:
    """Call a compiled function, or have it recorded.

    Args:
        name: what it is, for errors.
        function: takes `args`.
        args: tensors and numbers; all memory it touches but for what it allocates itself.
        written: which of them it writes.
        returns: what it returns, on the meta device.

    Returns:
        What `function` returns; in a captured graph, tensors as in `returns`, which hold it after a replay.
    """
    if _recorded.recorder is None:
        return function(*args)
    return _recorded.recorder.record_function(name, function, args, written, returns)


def current_streams() -> Streams | None:
    """The streams that what runs now may use; None where all work is to be done in order."""
    return _recorded.streams


@contextmanager
def offering(streams: Streams | None) -> Iterator[None]:
    """Offer streams to what runs in a block."""
    _recorded.streams, before = streams, _recorded.streams
    try:
        yield
    finally:
        _recorded.streams = before


def restoring(function: Callable[..., Result], *args: object) -> Result:
    """Call a function; whatever it leaves behind in this thread is taken back, interrupted or not.

    That is grad mode, autocast, modes, the capture and its lock, but not what the function is there to change.
    """
    before = _ThreadState.now()
    try:
        try:
            return function(*args)
        except BaseException as error:
            _close_blocks(error)
            before.torch.restore_flags()
            raise
        finally:
            before.restore()
    finally:
        before.restore()


@dataclass(frozen=True, slots=True)
class _ThreadState:
    torch: TorchState
    holds_lock: bool
    recorded: dict[str, object]

    @classmethod
    def now(cls) -> _ThreadState:
        return cls(TorchState.now(), _holds_lock(), dict(vars(_recorded)))

    def restore(self) -> None:
        self.torch.restore()
        if _recorded.paused_gc and not self.recorded.get("paused_gc"):
            with _capture_lock:  # of the whole process: another thread may be capturing by now
                gc.enable()
        if vars(_recorded) != self.recorded:
            vars(_recorded).clear()
            vars(_recorded).update(self.recorded)
        while _holds_lock() and not self.holds_lock:
            _capture_lock.release()


def _holds_lock() -> bool:
    """Whether this thread holds the lock; an RLock has no public way to ask."""
    return bool(getattr(_capture_lock, "_is_owned")())  # noqa: B009


def _close_blocks(error: BaseException) -> None:
    """Run the last lines of blocks that an exception cut short, now and not when somebody lets go of the exception.

    They are in generators, in the frames of `contextlib`, and in the frames of generated code.
    """
    errors, seen = [error], {id(error)}
    while errors:
        found = errors.pop()
        for other in (found.__context__, found.__cause__):
            if other is not None and id(other) not in seen:
                errors.append(other)
                seen.add(id(other))
        traceback = found.__traceback__
        while traceback is not None:
            path = traceback.tb_frame.f_code.co_filename
            if path == contextlib.__file__ or path.startswith("<"):
                with contextlib.suppress(RuntimeError):  # it runs still
                    traceback.tb_frame.clear()
            traceback = traceback.tb_next


@contextmanager
def recording(name: str, recorder: OpaqueRecorder | None = None) -> Iterator[None]:
    """What surrounds one capture; see the module docstring.

    Args:
        name: what is recorded, for errors.
        recorder: who records calls of `launch`; None where kernels are recorded wherever they come from.

    Raises:
        CaptureError: this thread is recording already.
    """
    if is_capturing():
        from ...errors import CaptureError

        outer = _recorded.name or "a CUDA graph of somebody else"
        raise CaptureError(
            f"cannot capture {name}: this thread is recording {outer}, and a capture cannot hold another one. "
            "Capture it before, or call what it would hold directly."
        )
    with _capture_lock, _paused_gc(), _no_autocast_cache(), torch.no_grad():
        _recorded.name, _recorded.recorder = name, recorder
        try:
            yield
        finally:
            _recorded.name, _recorded.recorder = None, None


@contextmanager
def no_capture_elsewhere() -> Iterator[None]:
    """Let no other thread capture meanwhile; waits for one that does."""
    if _recorded.name is not None:
        yield
        return
    with _capture_lock:
        yield


@contextmanager
def _paused_gc() -> Iterator[None]:
    if not gc.isenabled():
        yield
        return
    _recorded.paused_gc = True
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
        _recorded.paused_gc = False


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    was_enabled = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
