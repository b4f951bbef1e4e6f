"""What runs a piece: its graph as it is, or the functions of its parts one after another.

Either way results end up in tensors of the caller, the slots, with the planned strides. `fill` is what an engine
records. Values that only other parts of a piece take are temporaries: they are made while recording, in the pool.

A compiled function takes its inputs to be apart, and holds the numbers it was compiled with. A call that differs in
that runs the piece as it is: counted, and logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor, fx

from ..counting import counters
from ..draft import Draft, TensorMeta, Unit
from ..errors import PieceCompileError
from ..inspect.artifacts import log
from ..piece_compilers import CompiledPart, same_number, traced_numbers
from ..reasons import is_custom
from .aliasing import Aliasing
from .capture_state import launch
from .check_results import check_fresh, check_layout
from .sizes import Sizes
from .workspace import copier


class PieceFunction(Protocol):
    """Runs one piece, or the one it is a copy of, with the inputs of either; any thread may call it at any time."""

    def fill(self, inputs: Sequence[Any], slots: Sequence[Tensor]) -> None:
        """Run it, and leave the results in slots."""

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """Run it, and return fresh results."""


class EagerPiece:
    """A piece's own graph.

    Args:
        draft: the partitioned graph.
        unit: the piece.
        strict: custom ops have to keep the strides that their fakes promise.
    """

    def __init__(self, draft: Draft, unit: Unit, *, strict: bool = False) -> None:
        self._draft = draft
        self._unit = unit
        self._strict = strict

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """See `PieceFunction`."""
        results: Sequence[Tensor] = self._unit.gm.forward(*inputs)
        return results

    def fill(self, inputs: Sequence[Any], slots: Sequence[Tensor]) -> None:
        """See `PieceFunction`."""
        for node, slot, result in zip(self._unit.outputs, slots, self(*inputs), strict=True):
            check_layout(self._draft, node, result, slot, strides=self._strict and is_custom(self._draft, node))
            check_fresh(self._draft, node, result, inputs)
            copier(slot)(result)


class CompiledFill:
    """A compiled part: runs its function so that results end up in slots.

    Args:
        draft: the graph.
        unit: the part.
        part: its function.
    """

    def __init__(self, draft: Draft, unit: Unit, part: CompiledPart) -> None:
        self._draft = draft
        self._unit = unit
        self.part = part

    def fill(self, inputs: Sequence[Any], slots: Sequence[Tensor]) -> None:
        """Run it; while an engine records, an opaque function becomes one launch."""
        arguments = self.part.arguments(inputs)
        if self.part.compiler.fills_slots:
            function: Callable[..., Any] = self.part.function
        else:
            function = partial(self._copy_results, len(arguments))
        if self.part.compiler.opaque:
            launch(f"{self._unit.name}, compiled by {self.part.compiler.name}", function, (*arguments, *slots))
        else:
            function(*arguments, *slots)

    def _copy_results(self, count: int, *values: Any) -> None:
        slots = values[count:]
        results = _as_sequence(self.part.function(*values[:count]))
        if len(results) != len(slots) or not all(isinstance(result, Tensor) for result in results):
            kinds = ", ".join(type(result).__name__ for result in results)
            raise PieceCompileError(
                f"what {self.part.compiler.name} made of {self._unit.name} returned ({kinds}), the graph it was given "
                f"returns {len(slots)} tensors: return what the graph does"
            )
        for node, slot, result in zip(self._unit.outputs, slots, results, strict=True):
            if result.shape != slot.shape or result.dtype != slot.dtype:
                raise PieceCompileError(
                    f"what {self.part.compiler.name} made of {self._unit.name} returned {result.dtype} "
                    f"{list(result.shape)} for {node.name}, the graph it was given returns {slot.dtype} "
                    f"{list(slot.shape)}"
                )
            copier(slot)(result)


def _as_sequence(returned: Any) -> Sequence[Any]:
    """Compilers return nothing, a bare value, a list or a tuple."""
    if returned is None:
        return ()
    return returned if isinstance(returned, (list, tuple)) else (returned,)


@dataclass(frozen=True, slots=True)
class _Step:
    """A part, what runs it, and what nobody takes after it."""

    unit: Unit
    run: EagerPiece | CompiledFill
    last_used: tuple[fx.Node, ...]


class CompiledPiece:
    """A piece in parts, some of them compiled.

    Args:
        draft: the partitioned graph.
        unit: the piece.
        functions: of its parts in order; None for one that runs as it is.
    """

    def __init__(self, draft: Draft, unit: Unit, functions: Sequence[CompiledPart | None]) -> None:
        self._draft = draft
        self._unit = unit
        units = [part.unit for part in draft.parts[unit.name]]
        self._steps = [
            _Step(part, _runner(draft, part, function), _last_used(units, index, unit))
            for index, (part, function) in enumerate(zip(units, functions, strict=True))
        ]
        self._symbols = {symbol: node for symbol, node in draft.symbols.items() if node in unit.inputs}

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """See `PieceFunction`."""
        sizes = self._sizes(dict(zip(self._unit.inputs, inputs, strict=True)))
        slots = [sizes.allocate(self._meta(node)) for node in self._unit.outputs]
        self.fill(inputs, slots)
        return slots

    def fill(self, inputs: Sequence[Any], slots: Sequence[Tensor]) -> None:
        """See `PieceFunction`."""
        values = dict(zip(self._unit.inputs, inputs, strict=True))
        sizes = self._sizes(values)
        values.update(zip(self._unit.outputs, slots, strict=True))
        for step in self._steps:
            for node in (*step.unit.inputs, *step.unit.outputs):
                if node not in values:  # a temporary, or an allocation that several parts touch
                    values[node] = sizes.allocate(self._meta(node))
            step.run.fill([values[n] for n in step.unit.inputs], [values[n] for n in step.unit.outputs])
            for node in step.last_used:
                del values[node]

    def _sizes(self, values: Mapping[fx.Node, Any]) -> Sizes:
        return Sizes({symbol: int(values[node]) for symbol, node in self._symbols.items()})

    def _meta(self, node: fx.Node) -> TensorMeta:
        meta = self._draft.effects[node].result
        assert isinstance(meta, TensorMeta), f"{node} is no tensor"
        return meta


class Pieces:
    """The functions of a graph's pieces; any thread may ask at any time.

    Args:
        draft: the partitioned graph.
        functions: of the parts of each piece that is compiled and no copy; empty without a piece compiler.
        example_inputs: of the graph, as they were when it was traced and compiled.
    """

    def __init__(
        self, draft: Draft, functions: Mapping[str, Sequence[CompiledPart | None]], example_inputs: Sequence[Any]
    ) -> None:
        pieces = {unit.name: unit for unit in draft.units if unit.kind == "piece"}
        originals = {name: draft.copies.get(name, name) for name in pieces}
        eager = {name: EagerPiece(draft, pieces[name]) for name in originals.values()}
        compiled = {name: CompiledPiece(draft, pieces[name], parts) for name, parts in functions.items()}
        self.are_compiled = bool(compiled)
        self._eager: Mapping[str, PieceFunction] = {name: eager[original] for name, original in originals.items()}
        self._compiled = {name: compiled[original] for name, original in originals.items() if original in compiled}
        self._aliasing = Aliasing(draft, example_inputs)
        self._numbers = traced_numbers(draft, example_inputs)
        self._positions = {graph_input.node: place for place, graph_input in enumerate(draft.inputs)}
        self._takers = {
            number: [name for name, unit in pieces.items() if number in unit.inputs] for number in self._numbers
        }
        self._warned: set[str] = set()

    def for_call(self, args: Sequence[Any]) -> Mapping[str, PieceFunction]:
        """What runs each piece of a call with these arguments, by name."""
        if not self.are_compiled:
            return self._eager
        if self._aliasing.is_new(args):
            return self._step_back(list(self._eager), "inputs share memory, and did not when it was compiled")
        changed = [
            name
            for node, number in self._numbers.items()
            if not same_number(args[self._positions[node.all_input_nodes[0]]].item(), number)
            for name in self._takers[node]
        ]
        if changed:
            return self._step_back(changed, "a number among the arguments is not the one it was compiled with")
        return self._compiled

    def _step_back(self, names: Sequence[str], reason: str) -> Mapping[str, PieceFunction]:
        names = list(dict.fromkeys(names))
        counters.add(uncompiled_pieces=len(names))
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("%d pieces run uncompiled in such calls: %s", len(names), reason)
        return {**self._compiled, **{name: self._eager[name] for name in names}}


def _runner(draft: Draft, unit: Unit, function: CompiledPart | None) -> EagerPiece | CompiledFill:
    return EagerPiece(draft, unit, strict=True) if function is None else CompiledFill(draft, unit, function)


def _last_used(parts: Sequence[Unit], index: int, piece: Unit) -> tuple[fx.Node, ...]:
    """What no later part takes; a temporary goes back to the pool then."""
    later = {node for part in parts[index + 1 :] for node in part.inputs}
    kept = later.union(piece.inputs, piece.outputs)
    return tuple(dict.fromkeys(node for node in (*parts[index].inputs, *parts[index].outputs) if node not in kept))
