"""Calls that leave no trace: what a graph writes among its inputs is put back afterwards.

`dsv4_compile.capture` runs models on dummy inputs to capture their buckets. The caches and buffers that such a call
writes, and the stream of random numbers, must be afterwards what they were before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..draft import Draft


@dataclass(slots=True)
class Restoring:
    """One block of `restoring_calls`.

    Attributes:
        calls: how many compiled calls put back what they wrote.
    """

    calls: int = 0


class _Current(threading.local):
    block: Restoring | None = None


_current = _Current()


def is_restoring() -> bool:
    """Whether this thread is inside of `restoring_calls`."""
    return _current.block is not None


@contextmanager
def restoring_calls() -> Iterator[Restoring]:
    """Compiled calls of this thread, inside the block, put back what they write."""
    outer, _current.block = _current.block, Restoring()
    try:
        with torch.random.fork_rng():
            yield _current.block
    finally:
        _current.block = outer


@contextmanager
def restored_inputs(draft: Draft, args: Sequence[Any]) -> Iterator[None]:
    """Put back, at the end of the block, every argument that the graph writes."""
    written = draft.written()
    kept = [
        (arg, arg.clone())
        for graph_input, arg in zip(draft.inputs, args, strict=True)
        if isinstance(arg, Tensor) and draft.storage_of(graph_input.node) in written
    ]
    if _current.block is not None:
        _current.block.calls += 1
    try:
        yield
    finally:
        with torch.no_grad():  # a graph may leave grad enabled
            for tensor, before in kept:
                tensor.copy_(before)
