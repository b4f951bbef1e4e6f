"""Cut pieces into subgraphs: what the piece compiler gets, the custom ops between, and what runs on another stream.

    piece_0: mm, rope!, mul, sum        ->    piece_0.0: mm | piece_0.1: rope! | piece_0.2: mul, sum
             (rope is a custom op)            (compiled)      (as it is)         (compiled)

The piece is still captured as one graph. Two things force the cuts at custom ops. Inductor may compute a value again
after an opaque op has changed what it was computed from, and its cache on disk does not know the schemas of custom ops,
so a changed one gives the wrong numbers in the next process. And an op that is implemented in Python has to be recorded
op by op, which a compiled function around it would hide. Nothing is lost: no compiler fuses across an op it cannot see
into. Random draws are cut out likewise: a compiler leaves out those that nothing uses, and all later numbers differ.

A subgraph also ends before an op that writes memory from outside of it which the subgraph has read: in `t = x.clone();
x.add_(1); return t`, Inductor takes the clone for `x` itself, which by the time that it is stored holds one more. And
before an op that puts rows into a tensor that the subgraph made: Inductor does so in place, though a row may be a clone
of another one.

With side streams (`assign_streams`), a subgraph also ends where another stream waits for it, and begins where its own
stream waits. So events are recorded after subgraphs and waited for before subgraphs, and the order of the subgraphs is
one that keeps all waits.

A piece in which two values that would cross between subgraphs are one piece of memory stays whole, on one stream; the
plan has a note where that costs streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..analysis.stream_schedule import START, Events, events_of
from ..analysis.uncompiled_reasons import why_opaque, why_uncompiled
from ..compat.dispatch import pytree
from ..config import Config
from ..graph.build_units import Run, build_units, shared_allocations
from ..graph.partitioned import PartitionedGraph, Subgraph, Unit
from ..graph.traced import TensorMeta, TracedGraph
from ..graph.unit_key import UnitKey, unit_key
from .assign_streams import order_of

_PUTS = ("index_put", "index_add", "index_copy", "put")


@dataclass(frozen=True, slots=True)
class Conflict:
    """An earlier node that a node may not share a subgraph with.

    Attributes:
        earlier: index of that node among those of the piece.
        unless_with: index of the node that made the memory they conflict over; if it is in the subgraph too, all of
            that memory's life is, and the compiler sees it. None: nothing excuses it.
    """

    earlier: int
    unless_with: int | None


def cut_subgraphs(graph: PartitionedGraph, *, config: Config) -> PartitionedGraph:
    """Fill in `subgraphs` for every piece that is compiled or uses streams, and is not a duplicate of another one."""
    if graph.uncaptured is not None:
        return graph
    compiles = config.resolved_piece_compiler(graph.traced.device.type) != "eager"
    subgraphs: dict[str, tuple[Subgraph, ...]] = {}
    for unit in graph.units:
        is_original = unit.kind == "piece" and unit.name not in graph.duplicates
        if is_original and (compiles or graph.streams.keys() & set(unit.nodes)):
            subgraphs[unit.name] = _cut(graph, unit, compiles=compiles)
            if reason := _why_uncuttable(graph.traced, unit, subgraphs[unit.name]):
                subgraphs[unit.name] = (_whole(unit, reason),)
                graph = _on_one_stream(graph, unit, reason)
    return replace(graph, subgraphs=_with_duplicates(graph.traced, subgraphs) if compiles else subgraphs)


def _whole(piece: Unit, uncompiled: str) -> Subgraph:
    return Subgraph(
        unit=piece,
        uncompiled=uncompiled,
        leaving=tuple(True for _ in piece.outputs),
        duplicate_of=None,
        stream=0,
        waits=(),
        joins=False,
    )


def _on_one_stream(graph: PartitionedGraph, piece: Unit, reason: str) -> PartitionedGraph:
    """Take a piece, and its duplicates, off the side streams."""
    alike = [unit for unit in graph.units if graph.duplicates.get(unit.name, unit.name) == piece.name]
    nodes = {node for unit in alike for node in unit.nodes}
    if not graph.streams.keys() & nodes:
        return graph
    streams = {node: stream for node, stream in graph.streams.items() if node not in nodes}
    return replace(graph, streams=streams, notes=(*graph.notes, f"{piece.name} runs on one stream: {reason}"))


def _with_duplicates(
    traced: TracedGraph, subgraphs: Mapping[str, Sequence[Subgraph]]
) -> dict[str, tuple[Subgraph, ...]]:
    """The same subgraphs, each told which earlier one it is the same as."""
    scalars = traced.scalars()
    first: dict[tuple[UnitKey, tuple[bool, ...]], str] = {}

    def with_duplicate(subgraph: Subgraph) -> Subgraph:
        if subgraph.uncompiled is not None:
            return subgraph
        name = subgraph.unit.name
        original = first.setdefault((unit_key(traced, subgraph.unit, scalars), subgraph.leaving), name)
        return subgraph if original == name else replace(subgraph, duplicate_of=original)

    return {piece: tuple(map(with_duplicate, found)) for piece, found in subgraphs.items()}


def _cut(graph: PartitionedGraph, piece: Unit, *, compiles: bool) -> tuple[Subgraph, ...]:
    traced = graph.traced
    streams = [graph.streams.get(node, 0) for node in piece.nodes]
    events = events_of(order_of(piece.nodes, traced.effects), streams)
    opaque = [compiles and why_opaque(traced, node) is not None for node in piece.nodes]
    conflicts = _conflicts(traced, piece.nodes) if compiles else [() for _ in piece.nodes]
    runs = list(_runs(opaque, streams, events, conflicts))
    subgraph_of = {op: index for index, run in enumerate(runs) for op in run} | {START: START}
    units = _units(graph, piece, runs)
    return tuple(
        Subgraph(
            unit=unit,
            uncompiled=why_uncompiled(traced, unit) if compiles else "there is no piece compiler",
            leaving=tuple(node in piece.outputs for node in unit.outputs),
            duplicate_of=None,
            stream=streams[run[0]],
            waits=tuple(subgraph_of[op] for op in events.waits[run[0]]),
            joins=run[-1] in events.joins,
        )
        for unit, run in zip(units, runs, strict=True)
    )


def _conflicts(traced: TracedGraph, nodes: Sequence[fx.Node]) -> list[Sequence[Conflict]]:
    """For each node, the earlier ones that read, or made, what it overwrites."""
    made: dict[int, int] = {}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    found: list[Sequence[Conflict]] = []
    for index, node in enumerate(nodes):
        effects = traced.effects[node]
        conflicts = [Conflict(reader, made.get(old)) for old in effects.writes for reader in readers[old]]
        if any(op.partition("::")[2].partition(".")[0].rstrip("_") in _PUTS for op in effects.ops):
            users = [user for old in effects.reads for user in (*readers[old], made.get(old)) if user is not None]
            conflicts += [Conflict(user, None) for user in users]
        found.append(conflicts)
        for storage in effects.reads - effects.writes:
            readers[storage].append(index)
        for meta in pytree.tree_leaves(effects.result):
            if isinstance(meta, TensorMeta) and meta.storage not in effects.reads | effects.writes:
                made.setdefault(meta.storage, index)
    return found


def _runs(
    opaque: Sequence[bool], streams: Sequence[int], events: Events, conflicts: Sequence[Sequence[Conflict]]
) -> Iterator[list[int]]:
    """Indices of the nodes of each subgraph, ordered by their first."""
    awaited = {op for waits in events.waits for op in waits}
    runs: list[list[int]] = []
    open_run: dict[int, list[int]] = {}
    for op, stream in enumerate(streams):
        run = open_run.get(stream, [])
        if not run or events.waits[op] or run[-1] in awaited or opaque[run[-1]] != opaque[op]:
            starts = True
        else:
            starts = not opaque[op] and any(c.earlier in run and c.unless_with not in run for c in conflicts[op])
        if starts:
            run = open_run[stream] = []
            runs.append(run)
        run.append(op)
    yield from runs


def _units(graph: PartitionedGraph, piece: Unit, runs: Sequence[Sequence[int]]) -> list[Unit]:
    cut: list[Run] = [("piece", tuple(piece.nodes[op] for op in run)) for run in runs]
    inside = {node: index for index, (_, nodes) in enumerate(cut) for node in nodes}
    home = {node: inside.get(node, -1) for node in graph.traced.compute_nodes()}
    shared = shared_allocations(graph.traced, cut, home).union(graph.allocations)
    names = [f"{piece.name}.{index}" for index in range(len(cut))]
    return build_units(graph.traced, cut, names, home, shared, frozenset(piece.outputs))


def _why_uncuttable(traced: TracedGraph, piece: Unit, subgraphs: Sequence[Subgraph]) -> str | None:
    """Two values that cross between subgraphs are one piece of memory, which compiled subgraphs would tear apart."""
    owners: dict[int, str] = {}
    crossing = (node for subgraph in subgraphs for node in subgraph.unit.outputs)
    for node in dict.fromkeys((*piece.inputs, *crossing)):
        meta = traced.effects[node].result
        if isinstance(meta, TensorMeta):
            other = owners.setdefault(meta.storage, node.name)
            if other != node.name and node.op != "placeholder":
                return f"{node.name} shares memory with {other}, and both cross between its subgraphs"
    return None
