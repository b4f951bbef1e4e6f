"""Calls that leave no trace: what a graph writes among its inputs is put back afterwards.

`dsv4_compile.capture` runs models on dummy inputs to capture their buckets. The caches and buffers that such a call
writes, and the stream of random numbers, must be afterwards what they were before: that of the CPU, of the current CUDA
device, and of the devices of the graphs. Other devices are left alone, since other threads may draw from them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..compat.dispatch import may_overlap_itself
from ..graph.traced import TracedGraph
from .engines.select import real_device
from .memory.arena import extent_of


@dataclass(slots=True)
class Restoring:
    """One block of `restoring_calls`.

    Attributes:
        calls: how many compiled calls put back what they wrote.
        random_states: of the CUDA devices in use, as they were before.
    """

    calls: int = 0
    random_states: dict[torch.device, Tensor] = field(default_factory=dict)

    def save_random_state(self, device: torch.device) -> None:
        """Note the random state of a CUDA device, unless that was done before."""
        device = real_device(device)
        if device.type == "cuda" and device not in self.random_states:
            self.random_states[device] = torch.cuda.get_rng_state(device)


class _Current(threading.local):
    block: Restoring | None = None


_current = _Current()


def is_restoring() -> bool:
    """Whether this thread is inside of `restoring_calls`."""
    return _current.block is not None


@contextmanager
def restoring_calls() -> Iterator[Restoring]:
    """Compiled calls of this thread, inside the block, put back what they write."""
    block = Restoring()
    if torch.cuda.is_initialized():  # a model on the CPU is no reason to start CUDA
        block.save_random_state(torch.device("cuda"))
    outer, _current.block = _current.block, block
    try:
        with torch.random.fork_rng(devices=[]):
            yield block
    finally:
        _current.block = outer
        for device, state in block.random_states.items():
            torch.cuda.set_rng_state(state, device)


@contextmanager
def restored_inputs(traced: TracedGraph, args: Sequence[Any]) -> Iterator[None]:
    """Put back, at the end of the block, every argument that the graph writes."""
    written = traced.written()
    changing = [
        extent_of(arg) if may_overlap_itself(arg) else arg
        for graph_input, arg in zip(traced.inputs, args, strict=True)
        if isinstance(arg, Tensor) and traced.storage_of(graph_input.node) in written
    ]
    kept = [(tensor, tensor.clone()) for tensor in changing]
    if _current.block is not None:
        _current.block.calls += 1
        _current.block.save_random_state(traced.device)
    try:
        yield
    finally:
        with torch.no_grad():  # a graph may leave grad enabled
            for tensor, before in kept:
                tensor.copy_(before)
