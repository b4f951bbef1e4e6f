"""Runs the function that a piece compiler made of a subgraph, and gives its results where and as the plan has them.

Compilers differ in what their functions return: nothing, a bare tensor, a list or a tuple. Here, and nowhere else, that
is made one. A function that returns anything but what its graph does is named. What stays inside of the piece is taken
as it is returned, unless its strides are not the planned ones, or it is memory of an argument or of another result:
then it is copied. Equal values may be one tensor to a compiler; an op after it may write one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...errors import PieceCompileError
from ...graph.partitioned import Unit
from ...graph.traced import TracedGraph, Value
from ...piece_compilers import CompiledSubgraph
from ..engines.capture_state import launch
from ..memory.arena import copier
from .result_checks import has_strides_of


class CompiledFunction:
    """What runs a compiled subgraph.

    Args:
        traced: the graph.
        unit: the subgraph.
        subgraph: its function.
    """

    def __init__(self, traced: TracedGraph, unit: Unit, subgraph: CompiledSubgraph) -> None:
        self._subgraph = subgraph
        self._name = f"what {subgraph.compiler.name} made of {unit.name}"
        self._outputs = [node.name for node in unit.outputs]
        changed = traced.written_by(unit.nodes)
        self._written = (
            *subgraph.without_numbers([traced.storage_of(node) in changed for node in unit.inputs]),
            *[False for _ in subgraph.constants],
            *[True for is_filled in subgraph.filled if is_filled],
        )

    def run(self, inputs: Sequence[Value], slots: Sequence[Tensor | None], promised: Sequence[Tensor]) -> list[Tensor]:
        """Run it; while an engine records, an opaque function becomes one launch.

        Args:
            inputs: of the subgraph.
            slots: for each output, where it goes if it leaves the piece.
            promised: each output as the plan has it, on the meta device.

        Returns:
            The outputs: the slots, and what stays inside of the piece.
        """
        filled = [slot for slot, is_filled in zip(slots, self._subgraph.filled, strict=True) if is_filled]
        arguments = [*self._subgraph.arguments(inputs), *filled]
        wanted = [meta for meta, is_filled in zip(promised, self._subgraph.filled, strict=True) if not is_filled]
        if self._subgraph.compiler.opaque:
            returned = launch(self._name, self._subgraph.function, arguments, self._written, wanted)
        else:
            returned = self._subgraph.function(*arguments)
        results = iter(self._checked(as_sequence(returned), wanted))
        return list(self._place(arguments, results, slots, promised))

    def _place(
        self,
        arguments: Sequence[Value],
        results: Iterator[Tensor],
        slots: Sequence[Tensor | None],
        promised: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        taken = {arg.untyped_storage().data_ptr() for arg in arguments if isinstance(arg, Tensor)} - {0}
        for slot, is_filled, meta in zip(slots, self._subgraph.filled, promised, strict=True):
            result = slot if is_filled else next(results)
            assert result is not None, "what leaves the piece has a slot"
            if slot is None and not (has_strides_of(result, meta) and result.untyped_storage().data_ptr() not in taken):
                slot = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=result.device)
            if slot is None:
                taken.add(result.untyped_storage().data_ptr())
            elif slot is not result:
                copier(slot)(result)
            yield result if slot is None else slot

    def _checked(self, results: Sequence[Value], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results, if they are what the graph returns."""
        if len(results) != len(wanted) or not all(isinstance(result, Tensor) for result in results):
            kinds = ", ".join(type(result).__name__ for result in results)
            raise PieceCompileError(
                f"{self._name} returned ({kinds}), the graph it was given returns {len(wanted)} tensors: return what "
                "the graph does"
            )
        for name, result, meta in zip(self._returned_names(), results, wanted, strict=True):
            if result.shape != meta.shape or result.dtype != meta.dtype:
                raise PieceCompileError(
                    f"{self._name} returned {result.dtype} {list(result.shape)} for {name}, the graph it was given "
                    f"returns {meta.dtype} {list(meta.shape)}"
                )
        return results

    def _returned_names(self) -> list[str]:
        return [name for name, is_filled in zip(self._outputs, self._subgraph.filled, strict=True) if not is_filled]


def as_sequence(returned: object) -> Sequence[Value]:
    """What a compiler's function returned: nothing, a bare value, a list or a tuple."""
    if returned is None:
        return ()
    return returned if isinstance(returned, (list, tuple)) else (returned,)
