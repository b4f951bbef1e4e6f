"""A group of processes for a test, each with a time limit: what each of them returned or raised, and who was killed.

To start a process, with all that it imports, costs more than most of what is asked of it. So two of them are kept for
the next test, as long as all ends well in both; a call has a process group, and an environment, of its own.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from dsv4_compile import counters

GRACE = 5.0  # seconds that a process gets to end by itself once all others have


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one process.

    Attributes:
        value: what its function returned.
        error: the text of what it raised, with its class; None if it returned.
        exitcode: of the process; negative if a signal ended it; None if it goes on.
    """

    value: Any = None
    error: str | None = None
    exitcode: int | None = None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def gloo_group(rank: int, size: int, port: int, timeout: float = 120.0) -> Iterator[None]:
    """The default process group, over the loopback device."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Ranks:
    """Two processes that do what they are told, together.

    Attributes:
        processes: by rank.
    """

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.processes = []
        self._connections: list[Connection] = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()  # else nobody would notice the end of the process
            self.processes.append(process)
            self._connections.append(ours)

    def call(self, function: Callable[..., Any], args: tuple[object, ...], limit: float) -> list[Outcome | None]:
        """By rank, what a function returned or raised; None if the process ended, or took longer than the limit."""
        port, until = free_port(), time.monotonic() + limit
        for connection in self._connections:
            connection.send((function, port, args))
        outcomes: dict[Any, Outcome | None] = {}
        while len(outcomes) < 2:
            ready = wait([c for c in self._connections if c not in outcomes], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                outcomes[connection] = _received(connection)
        return [outcomes.get(connection) for connection in self._connections]

    def end(self) -> list[int | None]:
        """End both, and return their exit codes."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(GRACE)
            process.kill()
            process.join(GRACE)
        return [process.exitcode for process in self.processes]


def _received(connection: Any) -> Outcome | None:
    try:
        found: Outcome = connection.recv()
    except EOFError:  # the process has ended
        return None
    return found


_kept: list[Ranks] = []


def in_processes(
    function: Callable[..., Any], *args: object, limit: float = 200.0, is_last: bool = False
) -> list[Outcome]:
    """Call `function(rank, *args)` in two processes of one group, at once.

    Args:
        function: of a module, not of another function.
        args: what else it is given.
        limit: seconds after which those that are not done are killed.
        is_last: whether the processes end behind it.

    Returns:
        By rank, what became of it.
    """
    ranks = _kept.pop() if _kept else Ranks()
    outcomes = ranks.call(function, args, limit)
    if not is_last and all(outcome is not None and outcome.error is None for outcome in outcomes):
        _kept.append(ranks)
        codes: list[int | None] = [None, None]
    else:
        codes = ranks.end()
    return [replace(outcome or Outcome(), exitcode=code) for outcome, code in zip(outcomes, codes, strict=True)]


def _serve(connection: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, port, args = connection.recv()
        except EOFError:  # the test that asked is over
            return
        environment = dict(os.environ)
        torch._dynamo.reset()
        counters.reset()
        with warnings.catch_warnings():
            outcome = _called(function, rank, port, args)
        os.environ.clear()
        os.environ.update(environment)
        connection.send(outcome)


def _called(function: Callable[..., Any], rank: int, port: int, args: tuple[object, ...]) -> Outcome:
    try:
        with gloo_group(rank, 2, port):
            return Outcome(function(rank, *args))
    except BaseException as raised:
        traceback.print_exc()
        return Outcome(error=f"{type(raised).__name__}: {raised}")


def values_of(outcomes: list[Outcome]) -> list[Any]:
    """What both of them returned; fails if one did not."""
    assert [(outcome.error, outcome.exitcode or 0) for outcome in outcomes] == [(None, 0)] * 2
    return [outcome.value for outcome in outcomes]
