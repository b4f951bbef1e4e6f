"""Whether this thread records a graph, and the surroundings in which either engine records one.

One process-wide lock serialises captures: a second thread that wants to capture waits until the first is done. A
thread that already records is refused, since waiting for itself would never end. Replays take no lock.

While a capture runs, garbage collection is paused (a finaliser would run its kernels into the recording, and freeing
memory invalidates a CUDA capture), autocast's cache of cast weights is off (a cast that was recorded holds no value
yet, and one made before is freed by the end of its autocast block), and grad mode is off. All of it goes back to what
it was, however the capture ends.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_capture_lock = threading.Lock()


class OpaqueRecorder(Protocol):
    """An engine that has to be told of functions whose kernels do not go through torch's dispatcher."""

    def record_function(self, name: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
        """Record a call of `function`, as one launch, without calling it."""


class _Recorded(threading.local):
    """The name of what this thread records, and who has to be told of opaque functions."""

    name: str | None = None
    recorder: OpaqueRecorder | None = None


_recorded = _Recorded()


def is_capturing() -> bool:
    """True in the thread that records a graph, while it does: through this package, or by torch on a CUDA stream."""
    if _recorded.name is not None:
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def launch(name: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Call a compiled function that writes into its arguments, or have it recorded.

    Args:
        name: what it is, for errors.
        function: takes `args`; what it returns is of no interest.
        args: tensors and numbers; all memory it touches but for what it allocates itself.
    """
    if _recorded.recorder is None:
        function(*args)
    else:
        _recorded.recorder.record_function(name, function, args)


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
        from ..errors import CaptureError

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
def _paused_gc() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
