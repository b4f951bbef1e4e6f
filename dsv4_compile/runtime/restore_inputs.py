"""Calls that leave no trace: what a graph writes among its inputs is put back afterwards.

`dsv4_compile.capture` runs models on dummy inputs to capture their buckets. The caches and buffers that such a call
writes, and the stream of random numbers, must be afterwards what they were before: that of the CPU, of the current CUDA
device, and of the devices of the graphs. Other devices are left alone, since other threads may draw from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ..compat.dispatch import may_overlap_itself
from ..graph.traced import TracedGraph, Value
from .engines.capture_state import restoring
from .engines.select import real_device
from .memory.arena import extent_of

Args = TypeVar("Args", bound=Sequence[Value])
Result = TypeVar("Result")


@dataclass(slots=True)
class Restoring:
    """One block of `RestoringCalls`.

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
    """Whether this thread is inside of `RestoringCalls`."""
    return _current.block is not None


class RestoringCalls:
    """A block in which compiled calls of this thread put back what they write."""

    def __init__(self) -> None:
        self._block = Restoring()
        self._begun = False

    def __enter__(self) -> Restoring:
        if torch.cuda.is_initialized():  # a model on the CPU is no reason to start CUDA
            self._block.save_random_state(torch.device("cuda"))
        self._outer, self._random_state = _current.block, torch.get_rng_state()
        self._begun = True
        _current.block = self._block
        return self._block

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Leave the block; a second call does nothing."""
        if self._begun:
            _current.block = self._outer
            torch.set_rng_state(self._random_state)
            for device, state in self._block.random_states.items():
                torch.cuda.set_rng_state(state, device)
            self._begun = False


class RestoredInputs:
    """A block at whose end every argument that the graph writes is put back.

    Args:
        traced: the graph.
        args: of the call.
    """

    def __init__(self, traced: TracedGraph, args: Sequence[Value]) -> None:
        self._traced = traced
        self._args = args
        self._kept: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        written = self._traced.written()
        changing = [
            extent_of(arg) if may_overlap_itself(arg) else arg
            for graph_input, arg in zip(self._traced.inputs, self._args, strict=True)
            if isinstance(arg, Tensor) and self._traced.storage_of(graph_input.node) in written
        ]
        self._kept = [(tensor, tensor.clone()) for tensor in changing]
        if _current.block is not None:
            _current.block.calls += 1
            _current.block.save_random_state(self._traced.device)

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Leave the block; a second call does what is left to do."""
        restoring(self._put_back)

    def _put_back(self) -> None:
        with torch.no_grad():  # a graph may leave grad enabled
            while self._kept:
                tensor, before = self._kept[-1]
                tensor.copy_(before)
                self._kept.pop()


def call_restoring(function: Callable[[Args], Result], traced: TracedGraph, args: Args) -> Result:
    """Call a function with the arguments of a graph, and put back those that it writes, interrupted or not."""
    block = RestoredInputs(traced, args)
    try:
        with block:
            return function(args)
    finally:
        block.put_back()  # once more: an interrupt may have come while the block was left
