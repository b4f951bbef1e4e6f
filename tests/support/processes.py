"""A group of processes for a test, each with a time limit: what each of them returned or raised, and who was killed."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist

GRACE = 5.0  # seconds that a process gets to end by itself once all others have


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one process.

    Attributes:
        value: what its function returned.
        error: the text of what it raised, with its class; None if it returned.
        seconds: how long the function took.
        exitcode: of the process; negative if a signal ended it.
    """

    value: Any = None
    error: str | None = None
    seconds: float = 0.0
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


def in_processes(
    function: Callable[..., Any], *args: object, size: int = 2, limit: float = 200.0, timeout: float = 120.0
) -> list[Outcome]:
    """Call `function(rank, *args)` in so many processes of one group, at once.

    Args:
        function: of a module, not of another function.
        args: what else it is given.
        size: how many processes.
        limit: seconds after which those that are left are killed.
        timeout: of the process group.

    Returns:
        By rank, what became of it.
    """
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_run, args=(queue, function, rank, size, port, timeout, args)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        process.kill()
        process.join(GRACE)
    outcomes = {rank: Outcome(exitcode=process.exitcode) for rank, process in enumerate(processes)}
    while not queue.empty():
        rank, value, error, seconds = queue.get()
        outcomes[rank] = Outcome(value, error, seconds, outcomes[rank].exitcode)
    return [outcomes[rank] for rank in range(size)]


def _run(
    queue: Queue[Any],
    function: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    timeout: float,
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    start = time.monotonic()
    value = error = None
    try:
        with gloo_group(rank, size, port, timeout):
            start = time.monotonic()
            value = function(rank, *args)
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    queue.put((rank, value, error, time.monotonic() - start))


def values_of(outcomes: list[Outcome]) -> list[Any]:
    """What all of them returned; fails if one did not."""
    assert [(outcome.error, outcome.exitcode) for outcome in outcomes] == [(None, 0)] * len(outcomes)
    return [outcome.value for outcome in outcomes]
