"""Runs the function that a piece compiler made of a part, so that results end up in slots.

Compilers differ in what their functions take and return: some fill slots, others return nothing, a bare tensor, a list
or a tuple. Here, and nowhere else, that is made one. A function that returns anything but what its graph does is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..draft import Draft, TensorMeta, Unit
from ..errors import PieceCompileError
from ..piece_compilers import CompiledPart
from .capture_state import launch
from .workspace import copier


class CompiledFunction:
    """What runs a compiled part.

    Args:
        draft: the graph.
        unit: the part.
        part: its function.
    """

    def __init__(self, draft: Draft, unit: Unit, part: CompiledPart) -> None:
        self._unit = unit
        self._part = part
        changed = {storage for node in unit.nodes for storage in draft.effects[node].writes}
        metas = [draft.effects[node].result for node in unit.inputs]
        self._written = (
            *part.without_numbers([isinstance(meta, TensorMeta) and meta.storage in changed for meta in metas]),
            *[False for _ in part.constants],
            *[True for _ in unit.outputs],
        )

    def fill(self, inputs: Sequence[Any], slots: Sequence[Tensor]) -> None:
        """Run it; while an engine records, an opaque function becomes one launch."""
        arguments = self._part.arguments(inputs)
        if self._part.compiler.fills_slots:
            function: Callable[..., Any] = self._part.function
        else:
            function = partial(self._copy_results, len(arguments))
        if self._part.compiler.opaque:
            name = f"{self._unit.name}, compiled by {self._part.compiler.name}"
            launch(name, function, (*arguments, *slots), self._written)
        else:
            function(*arguments, *slots)

    def _copy_results(self, count: int, *values: Any) -> None:
        slots = values[count:]
        results = _as_sequence(self._part.function(*values[:count]))
        if len(results) != len(slots) or not all(isinstance(result, Tensor) for result in results):
            kinds = ", ".join(type(result).__name__ for result in results)
            raise PieceCompileError(
                f"what {self._part.compiler.name} made of {self._unit.name} returned ({kinds}), the graph it was given "
                f"returns {len(slots)} tensors: return what the graph does"
            )
        for node, slot, result in zip(self._unit.outputs, slots, results, strict=True):
            if result.shape != slot.shape or result.dtype != slot.dtype:
                raise PieceCompileError(
                    f"what {self._part.compiler.name} made of {self._unit.name} returned {result.dtype} "
                    f"{list(result.shape)} for {node.name}, the graph it was given returns {slot.dtype} "
                    f"{list(slot.shape)}"
                )
            copier(slot)(result)


def _as_sequence(returned: Any) -> Sequence[Any]:
    """Compilers return nothing, a bare value, a list or a tuple."""
    if returned is None:
        return ()
    return returned if isinstance(returned, (list, tuple)) else (returned,)
