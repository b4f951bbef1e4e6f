"""One program in the several processes that `torchrun` starts: the group of all of them, and who prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import TypeVar

import torch

Result = TypeVar("Result")

PATIENCE = timedelta(minutes=10)  # how long a process waits for the others; one of them may be compiling


def num_processes() -> int:
    """How many processes `torchrun` has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def one_of_many(device: torch.device) -> Iterator[None]:
    """Take part in the group of all processes, if there are several; only the first of them prints."""
    if num_processes() == 1:
        yield
        return
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if int(os.environ["RANK"]) else sys.stdout):
            yield
    finally:
        torch.compiler.reset()  # captured graphs go before the groups whose collectives they hold
        torch.distributed.destroy_process_group()


def after_the_first(make: Callable[[], Result]) -> Result:
    """What a function returns, which finds in the other processes what it has made in the first."""
    if num_processes() == 1:
        return make()
    if int(os.environ["RANK"]):
        torch.distributed.barrier()
        return make()
    made = make()
    torch.distributed.barrier()
    return made
