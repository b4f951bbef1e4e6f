"""What an engine is: it records the work of a callable once and replays that work, without the callable.

Two engines keep the same contract, and nothing outside this folder knows which one runs:

- `host` (CPU): a recorder of torch ops that behaves as a CUDA graph does, so that a mistake shows without a GPU.
- `cuda`: a thin layer over `torch.cuda.CUDAGraph`.

The contract, for a callable given to `capture`:

- No kernel runs while it is recorded; its tensors hold nothing of use until the first replay.
- A replay runs the recorded kernels on the recorded addresses with the recorded numbers, and no Python of it.
- What needs a value on the host is refused.
- It writes results into tensors of its caller. Its temporaries come from the pool, and their memory goes to a later
  capture of the same pool once the last reference is gone.
- Random kernels draw fresh numbers in every replay, and recording draws none.

Captures exclude each other (see `capture_state`). Recordings that share a pool share memory: neither two replays nor
a replay and a capture of one pool may run at the same time, and seeing to that is the caller's part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from ..errors import CaptureError, OptionError

ALIGNMENT = 256
# Two bytes that are NaN in every float type of torch, and a huge number in integers of 16 bits and more.
POISON = 0x7FFF
_making = threading.Lock()


class Pool(Protocol):
    """Memory of piece-internal temporaries; several captures may share one."""


class Captured(Protocol):
    """One recording.

    Attributes:
        replay: runs the recorded work. After `release` it raises CaptureError, also where it was taken out before.
    """

    replay: Callable[[], None]

    def release(self) -> None:
        """Free the recording and the pool memory that only it uses; a second call does nothing."""


class Engine(Protocol):
    """The verbs of both engines.

    Attributes:
        name: "host" or "cuda".
        replays_in_captures: whether a recording may be replayed in a thread that records another graph.
    """

    name: str
    replays_in_captures: bool

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory that outlives captures: see `allocate_poisoned`."""

    def make_pool(self) -> Any:
        """A new `Pool` for captures of this engine."""

    def warm_up(self, run: Callable[[], None], *, lanes: int = 0) -> None:
        """Call `run` for real, once, where captures of this engine will record it (cuda: on the same streams).

        Args:
            run: takes and returns nothing.
            lanes: how many side lanes `capture` will offer; an engine may offer them here already.
        """

    def capture(self, run: Callable[[], None], pool: Any, *, name: str, lanes: int = 0) -> Captured:
        """Call `run` once, recording its work.

        Args:
            run: takes and returns nothing; writes its results into tensors that the caller owns.
            pool: from `make_pool`.
            name: what is recorded, for errors: "piece_3 of bucket (16,)".
            lanes: how many side lanes `capture_state.current_lanes` offers to `run`.

        Raises:
            CaptureError: `run` does something that a graph cannot hold, or this thread is recording already.
            LaneRaceError: host engine only: work on two lanes conflicts, and no event orders it.
            Exception: whatever `run` raises; nothing is left of the recording then.
        """


class Recording:
    """A `Captured`: calls that replay in order, and what has to live as long as they do."""

    def __init__(self, name: str, launches: list[Callable[[], None]], keep_alive: list[Any]) -> None:
        def replay() -> None:
            for launch in launches:
                launch()

        self.replay: Callable[[], None] = replay
        self._name = name
        self._launches = launches
        self._keep_alive = keep_alive

    def release(self) -> None:
        """See `Captured.release`."""
        self._launches[:] = [partial(_refuse_replay, self._name)]
        self._keep_alive.clear()

    def __len__(self) -> int:
        """How many calls a replay makes."""
        return len(self._launches)


def _refuse_replay(name: str) -> NoReturn:
    raise CaptureError(f"{name} was replayed after its release: its memory is gone. Capture it again.")


def allocate_poisoned(nbytes: int, device: torch.device) -> Tensor:
    """Memory outside any pool and outside inference mode, so that it may be written in any mode.

    Args:
        nbytes: how much.
        device: where.

    Returns:
        uint8 [nbytes], aligned to 256 bytes, filled with `POISON`: a NaN or a huge index shows, a zero would not.
    """
    with torch.inference_mode(False), torch.no_grad():
        pairs = torch.full(((nbytes + ALIGNMENT + 1) // 2,), POISON, dtype=torch.int16, device=device)
        memory = pairs.view(torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]


def engine_for(name: Literal["auto", "cuda", "host"], device: torch.device) -> Engine:
    """The engine for inputs on a device; all callers of one `real_device` share it, and with it its capture stream.

    Args:
        name: "auto" takes cuda where the inputs are on a CUDA device and host where they are on the CPU.
        device: where the inputs are.

    Raises:
        OptionError: no engine of that name, or it cannot record work of that device.
    """
    if name not in ("auto", "cuda", "host"):
        raise OptionError(f"engine={name!r}: it must be 'auto', 'cuda' or 'host'")
    needed = {"cpu": "host", "cuda": "cuda"}.get(device.type)
    if needed is None or name not in ("auto", needed):
        known = f"use engine={needed!r} or 'auto'" if needed else "use engine='off'"
        raise OptionError(f"engine={name!r} cannot record the work of inputs on {device}: {known}")
    with _making:  # `cache` alone lets two threads make two engines
        return _make_engine(needed, real_device(device))


def real_device(device: torch.device) -> torch.device:
    """A device by its one name: "cuda" without an index is the current one, and there is one CPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


@cache
def _make_engine(name: str, device: torch.device) -> Engine:
    # imported when needed: either engine builds on this module
    if name == "cuda":
        from .cuda import CudaEngine

        engine: Engine = CudaEngine(device)
        return engine
    from .host import HostEngine

    return HostEngine()
