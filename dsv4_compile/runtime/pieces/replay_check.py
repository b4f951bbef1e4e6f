"""`check="full"`: each piece also runs uncaptured, and the first whose replay differs is named.

What runs is what was captured. A compiled piece is no mistake where it rounds otherwise than torch's own ops do: with
bfloat16 a compiler that keeps float32 between fused ops differs from them by more than any tolerance would allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...compat.dispatch import with_lazy_bits_of
from ...errors import ReplayMismatchError
from ...graph.partitioned import Unit
from ...graph.traced import TracedGraph, Value


class CheckedReplay:
    """Replays a piece, runs it uncaptured on clones of what it writes, and compares.

    Args:
        traced: for the effects of the piece.
        unit: the piece.
        run: what was captured; takes its inputs and returns fresh results.
        inputs: its stable inputs.
        slots: where its results go.
        replay: the replay to check.
    """

    def __init__(
        self,
        traced: TracedGraph,
        unit: Unit,
        run: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Value],
        slots: Sequence[Tensor],
        replay: Callable[[], None],
    ) -> None:
        self._unit = unit
        self._run = run
        self._inputs = inputs
        self._slots = slots
        self._replay = replay
        written = traced.written_by(unit.nodes)
        self._names = {graph_input.node: graph_input.name for graph_input in traced.inputs}
        self._written = [index for index, node in enumerate(unit.inputs) if traced.storage_of(node) in written]

    def __call__(self) -> None:
        """Replay.

        Raises:
            ReplayMismatchError: names the piece, the value and the largest difference.
        """
        inputs = list(self._inputs)
        clones = _clone_together([inputs[index] for index in self._written])
        for index, clone in zip(self._written, clones, strict=True):
            inputs[index] = clone
        touched = [value for value in (*self._inputs, *self._slots) if isinstance(value, Tensor)]
        devices = [tensor.device for tensor in touched if tensor.is_cuda]
        with torch.random.fork_rng(list(set(devices))):
            # first, so that what eager Python does now cannot repair what the replay left out
            self._replay()
        expected = [result.clone() for result in self._run(*inputs)]  # draws the same numbers
        for node, slot, value in zip(self._unit.outputs, self._slots, expected, strict=True):
            self._compare(f"its result {node.name}", slot, value)
        for index, clone in zip(self._written, clones, strict=True):
            node = self._unit.inputs[index]
            self._compare(f"what it wrote to {self._names.get(node, node.name)}", self._inputs[index], clone)

    def _compare(self, what: str, replayed: Tensor, eager: Tensor) -> None:
        try:
            torch.testing.assert_close(replayed, eager, equal_nan=True)
        except AssertionError as difference:
            raise ReplayMismatchError(
                f"the replay of {self._unit.name} differs from running it uncaptured in {what}: {difference}"
            ) from difference


def _clone_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Clones that share memory with each other where the originals do."""
    storages: dict[int, torch.UntypedStorage | None] = {}
    clones = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        copy = storages.setdefault(storage.data_ptr(), None) or storage.clone()
        storages[storage.data_ptr()] = copy
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        clone = empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
        clones.append(with_lazy_bits_of(tensor, clone))
    return clones
