"""What runs a piece: its graph as it is, or its subgraphs, compiled or not, in their order and on their streams.

Either way results end up in tensors of the caller, the slots, with the planned strides. `fill` is what an engine
records. Values that only other subgraphs of a piece take are temporaries: they are made while recording, in the pool.
Where an engine offers streams, temporaries live until all streams are joined, since the memory of a dead one may be
handed out while another stream still reads it. Otherwise subgraphs run one after another, and a temporary dies after
its last use.

Compiled subgraphs hold the numbers they were compiled with. A call that brings another one runs the piece as it is:
counted, and logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, fx

from ...analysis.eager_reasons import is_custom
from ...analysis.sizes import Sizes, SizesOfCalls
from ...analysis.stream_schedule import START
from ...counting import counters
from ...graph.partitioned import PartitionedGraph, Unit
from ...graph.traced import TensorMeta, Value
from ...log import log, pluralize
from ...piece_compilers import CompiledSubgraph, same_number
from ..engines.capture_state import Streams, current_streams
from ..memory.arena import copier
from .checked import CheckedRun, Notes
from .compiled import CompiledFunction
from .result_checks import check_fresh, check_layout, has_strides_of, why_unlike


class PieceFunction(Protocol):
    """Runs one piece, or the one it is a copy of, with the inputs of either; any thread may call it at any time."""

    def fill(self, inputs: Sequence[Value], slots: Sequence[Tensor]) -> None:
        """Run it, and leave the results in slots."""

    def __call__(self, *inputs: Value) -> Sequence[Tensor]:
        """Run it, and return fresh results."""

    def checked(self, *inputs: Value, notes: Notes | None = None) -> Sequence[Tensor]:
        """The same, with a look at what each op gives; see `CheckedRun`."""


class EagerPiece:
    """A piece's own graph.

    Args:
        graph: the partitioned graph.
        unit: the piece.
    """

    def __init__(self, graph: PartitionedGraph, unit: Unit) -> None:
        self._graph = graph
        self._unit = unit
        self.checked: Callable[..., Sequence[Tensor]] = CheckedRun(graph.traced, unit)

    def __call__(self, *inputs: Value) -> Sequence[Tensor]:
        """See `PieceFunction`."""
        results: Sequence[Tensor] = self._unit.gm.forward(*inputs)
        return results

    def fill(self, inputs: Sequence[Value], slots: Sequence[Tensor]) -> None:
        """See `PieceFunction`."""
        for node, slot, result in zip(self._unit.outputs, slots, self.checked(*inputs), strict=True):
            check_layout(self._graph.traced, node, result, slot)
            check_fresh(self._graph.traced, node, result, inputs)
            copier(slot)(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A subgraph, what runs it, where, and what nobody takes after it."""

    unit: Unit
    checked: CheckedRun
    function: CompiledFunction | None
    stream: int
    waits: tuple[int, ...]
    joins: bool
    is_awaited: bool
    last_used: tuple[fx.Node, ...]


class SubgraphPiece:
    """A piece in subgraphs, some of them compiled.

    Args:
        graph: the partitioned graph.
        unit: the piece.
        functions: of its subgraphs in order; None for one that runs as it is.
    """

    def __init__(self, graph: PartitionedGraph, unit: Unit, functions: Sequence[CompiledSubgraph | None]) -> None:
        self._graph = graph
        self._unit = unit
        self._steps = tuple(_steps(graph, unit, functions))
        # compiled code reads the results of the ops between where they are
        self._strict = any(function is not None for function in functions)
        self._sizes = SizesOfCalls(
            {symbol: node for symbol, node in graph.traced.symbols.items() if node in unit.inputs}
        )

    def __call__(self, *inputs: Value) -> Sequence[Tensor]:
        """See `PieceFunction`."""
        return self.checked(*inputs)

    def checked(self, *inputs: Value, notes: Notes | None = None) -> Sequence[Tensor]:
        """See `PieceFunction`; what was compiled is not looked into."""
        sizes = self._sizes.of(dict(zip(self._unit.inputs, inputs, strict=True)))
        slots = [sizes.allocate(self._meta(node)) for node in self._unit.outputs]
        values = self._fill(inputs, slots, notes)
        return [values[node] for node in self._unit.outputs]

    def fill(self, inputs: Sequence[Value], slots: Sequence[Tensor]) -> None:
        """See `PieceFunction`."""
        self._fill(inputs, slots, None)

    def _fill(self, inputs: Sequence[Value], slots: Sequence[Tensor], notes: Notes | None) -> dict[fx.Node, Value]:
        """The results: the slots, or with notes what is not as promised."""
        values = dict(zip(self._unit.inputs, inputs, strict=True))
        sizes = self._sizes.of(values)
        values.update(zip(self._unit.outputs, slots, strict=True))
        streams = current_streams()
        if streams is None or all(step.stream == 0 for step in self._steps):
            for step in self._steps:
                self._run(step, values, sizes, notes)
                for node in step.last_used:
                    del values[node]
        else:
            self._run_on_streams(streams, values, sizes, notes)
        return values

    def _run_on_streams(
        self, streams: Streams, values: dict[fx.Node, Value], sizes: Sizes, notes: Notes | None
    ) -> None:
        """Fork from stream 0, run each subgraph after what it waits for, and join, also when a subgraph fails."""
        events: dict[int, object] = {START: streams.record(0)}
        forked: set[int] = set()
        try:
            for index, step in enumerate(self._steps):
                for awaited in step.waits:
                    streams.wait(step.stream, events[awaited])
                forked.add(step.stream)
                with streams.on(step.stream):
                    self._run(step, values, sizes, notes)
                if step.is_awaited:
                    events[index] = streams.record(step.stream)
        except BaseException:
            with suppress(RuntimeError):  # an invalid capture takes no events; the first error counts
                for stream in forked - {0}:
                    streams.wait(0, streams.record(stream))
            raise
        for index, step in enumerate(self._steps):
            if step.joins:
                streams.wait(0, events[index])

    def _run(self, step: _Step, values: dict[fx.Node, Value], sizes: Sizes, notes: Notes | None) -> None:
        for node in step.unit.inputs:
            if node not in values:  # an allocation that several subgraphs touch
                values[node] = sizes.allocate(self._meta(node))
        inputs = [values[node] for node in step.unit.inputs]
        if step.function is None or notes:  # compiled code would not know what to do with what is not as promised
            self._run_as_it_is(step, inputs, values, sizes, notes)
            return
        promised = [sizes.meta_tensor(self._meta(node)) for node in step.unit.outputs]
        results = step.function.run(inputs, [values.get(node) for node in step.unit.outputs], promised)
        values.update(zip(step.unit.outputs, results, strict=True))

    def _run_as_it_is(
        self, step: _Step, inputs: Sequence[Value], values: dict[fx.Node, Value], sizes: Sizes, notes: Notes | None
    ) -> None:
        """Results that leave the piece are copied to their slots, the others are taken as they are."""
        for node, result in zip(step.unit.outputs, step.checked(*inputs, notes=notes), strict=True):
            promised = sizes.meta_tensor(self._meta(node))
            if notes is not None and not is_custom(self._graph.traced, node):
                reason = why_unlike(self._graph.traced, node, result, promised)
                if reason is not None:
                    notes[reason] = None
                    values[node] = result
                    continue
            check_fresh(self._graph.traced, node, result, inputs)
            check_layout(
                self._graph.traced, node, result, promised, strides=self._strict and is_custom(self._graph.traced, node)
            )
            if node in values:
                copier(values[node])(result)
            elif self._strict and not has_strides_of(result, promised):
                values[node] = sizes.allocate(self._meta(node))
                copier(values[node])(result)
            else:
                values[node] = result

    def _meta(self, node: fx.Node) -> TensorMeta:
        meta = self._graph.traced.effects[node].result
        assert isinstance(meta, TensorMeta), f"{node} is no tensor"
        return meta


class Pieces:
    """The functions of a graph's pieces; any thread may ask at any time.

    Args:
        graph: the partitioned graph.
        functions: of the subgraphs of each piece in `graph.subgraphs`; None for a subgraph that runs as it is.
    """

    def __init__(self, graph: PartitionedGraph, functions: Mapping[str, Sequence[CompiledSubgraph | None]]) -> None:
        pieces = {unit.name: unit for unit in graph.units if unit.kind == "piece"}
        originals = {name: graph.duplicates.get(name, name) for name in pieces}
        eager: dict[str, PieceFunction] = {name: EagerPiece(graph, pieces[name]) for name in set(originals.values())}
        parted = {name: SubgraphPiece(graph, pieces[name], subgraphs) for name, subgraphs in functions.items()}
        best: dict[str, PieceFunction] = {**eager, **parted}
        self._are_parted = bool(parted)
        self.are_compiled = any(subgraph is not None for subgraphs in functions.values() for subgraph in subgraphs)
        self._eager: Mapping[str, PieceFunction] = {name: eager[original] for name, original in originals.items()}
        self._best: Mapping[str, PieceFunction] = {name: best[original] for name, original in originals.items()}
        self._numbers = graph.traced.scalars() if self.are_compiled else {}
        self._positions = {graph_input.node: index for index, graph_input in enumerate(graph.traced.inputs)}
        self._takers = {
            number: [name for name, unit in pieces.items() if number in unit.inputs] for number in self._numbers
        }
        self._warned: set[str] = set()

    def for_call(self, args: Sequence[Value]) -> Mapping[str, PieceFunction]:
        """What runs each piece of a call with these arguments, by name."""
        if not self._are_parted:
            return self._best
        changed = [
            name
            for node, number in self._numbers.items()
            if not same_number(args[self._positions[node.all_input_nodes[0]]].item(), number)
            for name in self._takers[node]
        ]
        if changed:
            return self._fall_back(changed, "a number among the arguments is not the one it was compiled with")
        return self._best

    def uncompiled(self) -> Mapping[str, PieceFunction]:
        """What runs each piece as it is, by name."""
        return self._eager

    def _fall_back(self, names: Sequence[str], reason: str) -> Mapping[str, PieceFunction]:
        names = list(dict.fromkeys(names))
        counters.add(uncompiled_pieces=len(names))
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("%s run uncompiled and on one stream in such calls: %s", pluralize(len(names), "piece"), reason)
        return {**self._best, **{name: self._eager[name] for name in names}}


def _steps(graph: PartitionedGraph, piece: Unit, functions: Sequence[CompiledSubgraph | None]) -> Iterator[_Step]:
    subgraphs = graph.subgraphs[piece.name]
    awaited = {index for subgraph in subgraphs for index in subgraph.waits}
    for index, (subgraph, function) in enumerate(zip(subgraphs, functions, strict=True)):
        yield _Step(
            unit=subgraph.unit,
            checked=CheckedRun(graph.traced, subgraph.unit),
            function=None if function is None else CompiledFunction(graph.traced, subgraph.unit, function),
            stream=subgraph.stream,
            waits=subgraph.waits,
            joins=subgraph.joins,
            is_awaited=subgraph.joins or index in awaited,
            last_used=_last_used([subgraph.unit for subgraph in subgraphs], index, piece),
        )


def _last_used(subgraphs: Sequence[Unit], index: int, piece: Unit) -> tuple[fx.Node, ...]:
    """What no later subgraph takes; a temporary goes back to the pool then."""
    later = {node for subgraph in subgraphs[index + 1 :] for node in subgraph.inputs}
    kept = later.union(piece.inputs, piece.outputs)
    return tuple(
        dict.fromkeys(node for node in (*subgraphs[index].inputs, *subgraphs[index].outputs) if node not in kept)
    )
