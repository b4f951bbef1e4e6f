"""What runs a piece: its graph as it is, or its parts, compiled or not, in their order and on their lanes.

Either way results end up in tensors of the caller, the slots, with the planned strides. `fill` is what an engine
records. Values that only other parts of a piece take are temporaries: they are made while recording, in the pool. Where
an engine offers lanes, temporaries live until all lanes are joined, since the memory of a dead one may be handed out
while another lane still reads it. Otherwise parts run one after another, and a temporary dies after its last use.

Parts take inputs to be apart that were apart when the graph was traced, and compiled ones hold the numbers they were
compiled with. A call that differs in that runs the piece as it is: counted, and logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, fx

from ..compat import GUARDS_STRIDES
from ..counting import counters
from ..draft import Draft, TensorMeta, Unit
from ..inspect.artifacts import log
from ..lane_schedule import START
from ..piece_compilers import CompiledPart, same_number
from ..plan_text import counted
from ..reasons import is_custom
from .aliasing import Aliasing
from .capture_state import Lanes, current_lanes
from .check_results import check_fresh, check_layout, has_strides_of
from .checked_run import CheckedRun
from .compiled_function import CompiledFunction
from .sizes import Sizes, SizesOfCalls
from .workspace import copier


class PieceFunction(Protocol):
    """Runs one piece, or the one it is a copy of, with the inputs of either; any thread may call it at any time."""

    def fill(self, inputs: Sequence[Any], slots: Sequence[Tensor]) -> None:
        """Run it, and leave the results in slots."""

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """Run it, and return fresh results."""

    def checked(self, *inputs: Any) -> Sequence[Tensor]:
        """The same, with a look at what each custom op gives."""


class EagerPiece:
    """A piece's own graph.

    Args:
        draft: the partitioned graph.
        unit: the piece.
    """

    def __init__(self, draft: Draft, unit: Unit) -> None:
        self._draft = draft
        self._unit = unit
        self.checked: Callable[..., Sequence[Tensor]] = CheckedRun(draft, unit)

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """See `PieceFunction`."""
        results: Sequence[Tensor] = self._unit.gm.forward(*inputs)
        return results

    def fill(self, inputs: Sequence[Any], slots: Sequence[Tensor]) -> None:
        """See `PieceFunction`."""
        for node, slot, result in zip(self._unit.outputs, slots, self.checked(*inputs), strict=True):
            check_layout(self._draft, node, result, slot)
            check_fresh(self._draft, node, result, inputs)
            copier(slot)(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A part, what runs it, where, and what nobody takes after it."""

    unit: Unit
    checked: CheckedRun
    function: CompiledFunction | None
    lane: int
    waits: tuple[int, ...]
    joins: bool
    is_awaited: bool
    last_used: tuple[fx.Node, ...]


class PartedPiece:
    """A piece in parts, some of them compiled.

    Args:
        draft: the partitioned graph.
        unit: the piece.
        functions: of its parts in order; None for one that runs as it is.
    """

    def __init__(self, draft: Draft, unit: Unit, functions: Sequence[CompiledPart | None]) -> None:
        self._draft = draft
        self._unit = unit
        self._steps = tuple(_steps(draft, unit, functions))
        # compiled code reads the results of the ops between where they are
        self._strict = any(function is not None for function in functions)
        self._sizes = SizesOfCalls({symbol: node for symbol, node in draft.symbols.items() if node in unit.inputs})

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        """See `PieceFunction`."""
        sizes = self._sizes.of(dict(zip(self._unit.inputs, inputs, strict=True)))
        slots = [sizes.allocate(self._meta(node)) for node in self._unit.outputs]
        self.fill(inputs, slots)
        return slots

    checked = __call__  # it always looks

    def fill(self, inputs: Sequence[Any], slots: Sequence[Tensor]) -> None:
        """See `PieceFunction`."""
        values = dict(zip(self._unit.inputs, inputs, strict=True))
        sizes = self._sizes.of(values)
        values.update(zip(self._unit.outputs, slots, strict=True))
        lanes = current_lanes()
        if lanes is None or all(step.lane == 0 for step in self._steps):
            for step in self._steps:
                self._run(step, values, sizes)
                for node in step.last_used:
                    del values[node]
        else:
            self._run_on_lanes(lanes, values, sizes)

    def _run_on_lanes(self, lanes: Lanes, values: dict[fx.Node, Any], sizes: Sizes) -> None:
        """Fork from lane 0, run each part behind what it waits for, and join into lane 0, also when a part fails."""
        events: dict[int, object] = {START: lanes.record(0)}
        forked: set[int] = set()
        try:
            for index, step in enumerate(self._steps):
                for awaited in step.waits:
                    lanes.wait(step.lane, events[awaited])
                forked.add(step.lane)
                with lanes.on(step.lane):
                    self._run(step, values, sizes)
                if step.is_awaited:
                    events[index] = lanes.record(step.lane)
        except BaseException:
            with suppress(RuntimeError):  # an invalid capture takes no events; the first error counts
                for lane in forked - {0}:
                    lanes.wait(0, lanes.record(lane))
            raise
        for index, step in enumerate(self._steps):
            if step.joins:
                lanes.wait(0, events[index])

    def _run(self, step: _Step, values: dict[fx.Node, Any], sizes: Sizes) -> None:
        for node in step.unit.inputs:
            if node not in values:  # an allocation that several parts touch
                values[node] = sizes.allocate(self._meta(node))
        inputs = [values[node] for node in step.unit.inputs]
        if step.function is None:
            self._run_as_it_is(step, inputs, values, sizes)
            return
        promised = [sizes.promised(self._meta(node)) for node in step.unit.outputs]
        results = step.function.run(inputs, [values.get(node) for node in step.unit.outputs], promised)
        values.update(zip(step.unit.outputs, results, strict=True))

    def _run_as_it_is(self, step: _Step, inputs: Sequence[Any], values: dict[fx.Node, Any], sizes: Sizes) -> None:
        """Results that leave the piece are copied to their slots, the others are taken as they are."""
        for node, result in zip(step.unit.outputs, step.checked(*inputs), strict=True):
            promised = sizes.promised(self._meta(node))
            check_fresh(self._draft, node, result, inputs)
            check_layout(self._draft, node, result, promised, strides=self._strict and is_custom(self._draft, node))
            if node in values:
                copier(values[node])(result)
            elif self._strict and not has_strides_of(result, promised):
                values[node] = sizes.allocate(self._meta(node))
                copier(values[node])(result)
            else:
                values[node] = result

    def _meta(self, node: fx.Node) -> TensorMeta:
        meta = self._draft.effects[node].result
        assert isinstance(meta, TensorMeta), f"{node} is no tensor"
        return meta


class Pieces:
    """The functions of a graph's pieces; any thread may ask at any time.

    Args:
        draft: the partitioned graph.
        functions: of the parts of each piece in `draft.parts`; None for a part that runs as it is.
        example_inputs: of the graph, as they were when it was traced and compiled.
    """

    def __init__(
        self, draft: Draft, functions: Mapping[str, Sequence[CompiledPart | None]], example_inputs: Sequence[Any]
    ) -> None:
        pieces = {unit.name: unit for unit in draft.units if unit.kind == "piece"}
        originals = {name: draft.copies.get(name, name) for name in pieces}
        eager: dict[str, PieceFunction] = {name: EagerPiece(draft, pieces[name]) for name in set(originals.values())}
        parted = {name: PartedPiece(draft, pieces[name], parts) for name, parts in functions.items()}
        best: dict[str, PieceFunction] = {**eager, **parted}
        self._are_parted = bool(parted)
        self.are_compiled = any(part is not None for parts in functions.values() for part in parts)
        self._eager: Mapping[str, PieceFunction] = {name: eager[original] for name, original in originals.items()}
        self._best: Mapping[str, PieceFunction] = {name: best[original] for name, original in originals.items()}
        self._aliasing = Aliasing(draft, example_inputs)
        self._numbers = draft.scalars() if self.are_compiled else {}
        self._positions = {graph_input.node: place for place, graph_input in enumerate(draft.inputs)}
        weights = [] if GUARDS_STRIDES else [place for place, i in enumerate(draft.inputs) if i.owned]
        self._strides = {place: example_inputs[place].stride() for place in weights} if self.are_compiled else {}
        self._takers = {
            number: [name for name, unit in pieces.items() if number in unit.inputs] for number in self._numbers
        }
        self._warned: set[str] = set()

    def for_call(self, args: Sequence[Any]) -> Mapping[str, PieceFunction]:
        """What runs each piece of a call with these arguments, by name."""
        if not self._are_parted:
            return self._best
        if self._aliasing.is_new(args):
            return self._step_back(list(self._eager), "inputs share memory, and did not when it was compiled")
        if any(args[place].stride() != stride for place, stride in self._strides.items()):
            return self._step_back(list(self._eager), "a weight has other strides than when it was compiled")
        changed = [
            name
            for node, number in self._numbers.items()
            if not same_number(args[self._positions[node.all_input_nodes[0]]].item(), number)
            for name in self._takers[node]
        ]
        if changed:
            return self._step_back(changed, "a number among the arguments is not the one it was compiled with")
        return self._best

    def _step_back(self, names: Sequence[str], reason: str) -> Mapping[str, PieceFunction]:
        names = list(dict.fromkeys(names))
        counters.add(uncompiled_pieces=len(names))
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("%s run uncompiled and on one lane in such calls: %s", counted(len(names), "piece"), reason)
        return {**self._best, **{name: self._eager[name] for name in names}}


def _steps(draft: Draft, piece: Unit, functions: Sequence[CompiledPart | None]) -> Iterator[_Step]:
    parts = draft.parts[piece.name]
    awaited = {place for part in parts for place in part.waits}
    for index, (part, function) in enumerate(zip(parts, functions, strict=True)):
        yield _Step(
            unit=part.unit,
            checked=CheckedRun(draft, part.unit),
            function=None if function is None else CompiledFunction(draft, part.unit, function),
            lane=part.lane,
            waits=part.waits,
            joins=part.joins,
            is_awaited=part.joins or index in awaited,
            last_used=_last_used([part.unit for part in parts], index, piece),
        )


def _last_used(parts: Sequence[Unit], index: int, piece: Unit) -> tuple[fx.Node, ...]:
    """What no later part takes; a temporary goes back to the pool then."""
    later = {node for part in parts[index + 1 :] for node in part.inputs}
    kept = later.union(piece.inputs, piece.outputs)
    return tuple(dict.fromkeys(node for node in (*parts[index].inputs, *parts[index].outputs) if node not in kept))
