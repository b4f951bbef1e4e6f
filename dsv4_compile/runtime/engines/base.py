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

Captures exclude each other (see `capture_state`). Captured graphs that share a pool share memory: neither two replays
nor a replay and a capture of one pool may run at the same time, and seeing to that is the caller's part. What graphs of
one engine share beyond that is the engine's: a call that is going to replay, warm up or capture begins with `follow`,
goes on only if that returns True, and ends with `leave`.

    with the lock of its arena and pool held:
        try:
            if engine.follow(call): replay, eager op, replay, ...
            else: run uncaptured, in memory of its own
        finally: engine.leave(call)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from ...analysis.slot_placement import ALIGNMENT
from ...compat.thread_state import OutsideInferenceMode
from ...errors import CaptureError

# Two bytes that are NaN in every float type of torch, and a huge number in integers of 16 bits and more.
POISON = 0x7FFF


class Pool(Protocol):
    """Memory of piece-internal temporaries; several captures may share one."""


class CapturedGraph(Protocol):
    """One captured graph.

    Attributes:
        replay: runs the recorded work. After `release` it raises CaptureError, also where it was taken out before.
    """

    replay: Callable[[], None]

    def release(self) -> None:
        """Free the capture and the pool memory that only it uses; a second call does nothing."""


class Engine(Protocol):
    """The verbs of both engines.

    Attributes:
        name: "host" or "cuda".
        replays_in_captures: whether a captured graph may be replayed in a thread that records another graph.
    """

    name: str
    replays_in_captures: bool

    def follow(self, call: object, *, alone: bool = False) -> bool:
        """Order what the caller does next after all work of calls before, on whichever streams that is.

        A call inside of another one, in the same thread, follows too.

        Args:
            call: stands for the call, until `leave`; hashed by identity.
            alone: the call warms up or captures: no other thread's call may go on meanwhile.

        Returns:
            False where that cannot be had: another thread's call goes on. Then the caller may use nothing that
            captured graphs use. Always True on the host, where work is done in order.
        """

    def leave(self, call: object) -> None:
        """The end of a call that `follow` let go on, in the same thread; nothing for one that it did not.

        May be called twice for a call: an interrupt may come at any place of the first time.
        """

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory that outlives captures: see `allocate_poisoned`."""

    def make_pool(self) -> Pool:
        """A new `Pool` for captures of this engine."""

    def warm_up(self, run: Callable[[], object], *, streams: int = 0) -> str | None:
        """Call `run` for real, once, where captures of this engine will record it (cuda: on the same streams).

        Args:
            run: takes nothing. What it returns, a tensor or a sequence of tensors, is for its caller to use.
            streams: how many side streams `capture` will offer; an engine may offer them here already.

        Returns:
            The name of an op of which a capture would record another layout than its kernel has given; None if there
            is none, and where captures record what kernels give.
        """

    def capture(self, run: Callable[[], object], pool: Any, *, name: str, streams: int = 0) -> CapturedGraph:
        """Call `run` once, recording its work; once more if there was no memory for that, and there may be now.

        Args:
            run: takes nothing; writes its results into tensors that the caller owns.
            pool: from `make_pool`.
            name: what is recorded, for errors: "piece_3 of bucket (16,)".
            streams: how many side streams `capture_state.current_streams` offers to `run`.

        Raises:
            CaptureError: `run` does something that a graph cannot hold, or this thread is recording already.
            StreamRaceError: host engine only: work on two streams conflicts, and no event orders it.
            torch.OutOfMemoryError: there is no memory for what it allocates, or for the graph.
            Exception: whatever `run` raises; nothing is left of the capture then.
        """


class LaunchRecord:
    """A `CapturedGraph`: calls that replay in order, and what has to live as long as they do."""

    def __init__(self, name: str, launches: list[Callable[[], object]], keep_alive: Sequence[object]) -> None:
        def replay() -> None:
            for launch in launches:
                launch()

        self.replay: Callable[[], None] = replay
        self._name = name
        self._launches = launches
        self._keep_alive = list(keep_alive)

    def release(self) -> None:
        """See `CapturedGraph.release`."""
        self._launches[:] = [partial(refuse_replay, self._name)]
        self._keep_alive.clear()

    def __len__(self) -> int:
        """How many calls a replay makes."""
        return len(self._launches)


def refuse_replay(name: str) -> NoReturn:
    """What a captured graph does once it was released."""
    raise CaptureError(f"{name} was replayed after its release: its memory is gone. Capture it again.")


def allocate_poisoned(nbytes: int, device: torch.device) -> Tensor:
    """Memory outside any pool and outside inference mode, so that it may be written in any mode.

    Args:
        nbytes: how much.
        device: where.

    Returns:
        uint8 [nbytes], aligned to 256 bytes, filled with `POISON`: a NaN or a huge index shows, a zero would not.
    """
    with OutsideInferenceMode(), torch.no_grad():
        pairs = torch.full(((nbytes + ALIGNMENT + 1) // 2,), POISON, dtype=torch.int16, device=device)
        memory = pairs.view(torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]
