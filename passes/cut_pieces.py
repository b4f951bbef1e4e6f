"""Cut pieces into parts: what the piece compiler gets, the custom ops between, and what runs on another lane.

    piece_0: mm, rope!, mul, sum        ->    piece_0.0: mm | piece_0.1: rope! | piece_0.2: mul, sum
             (rope is a custom op)            (compiled)      (as it is)         (compiled)

The piece is still captured as one graph. Two things force the cuts at custom ops. Inductor may compute a value again
after an opaque op has changed what it was computed from, and its cache on disk does not know the schemas of custom ops,
so a changed one gives the wrong numbers in the next process. And an op that is implemented in Python has to be recorded
op by op, which a compiled function around it would hide. Nothing is lost: no compiler fuses across an op it cannot see
into. Random draws are cut out likewise: a compiler leaves out those that nothing takes, and all later numbers differ.

A part also ends before an op that writes memory from outside of it which the part has read: in `t = x.clone();
x.add_(1); return t`, Inductor takes the clone for `x` itself, which by the time that it is stored holds one more. And
before an op that puts rows into a tensor that the part made: Inductor does so in place, though a row may be a clone of
another one.

With lanes (`assign_lanes`), a part also ends where another lane waits for it, and begins where its lane waits. So
events are recorded behind parts and waited for before parts, and the order of the parts is one that keeps all waits.

A piece in which two values that would cross between parts are one piece of memory stays whole, on one lane; the plan
has a note where that costs lanes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from ..compat import expr_of, pytree
from ..config import Config
from ..draft import Draft, Part, TensorMeta, Unit
from ..lane_schedule import START, Events, events_of
from ..op_facts import strided_name
from ..reasons import custom_ops, graph_device, is_body
from .assign_lanes import order_of
from .find_copies import piece_key
from .partition_graph import Run, build_units, shared_allocations

Pair = tuple[int, int]
_PUTS = ("index_put", "index_add", "index_copy", "put")


def cut_pieces(draft: Draft, *, config: Config) -> Draft:
    """Fill in `parts` for every piece that is compiled or uses lanes, and is not a copy of another one."""
    if draft.uncaptured is not None:
        return draft
    compiles = config.resolved_piece_compiler(graph_device(draft).type) != "eager"
    pieces = [
        unit
        for unit in draft.units
        if unit.kind == "piece" and unit.name not in draft.copies and (compiles or draft.lanes.keys() & set(unit.nodes))
    ]
    parts = {piece.name: _cut(draft, piece, compiles=compiles) for piece in pieces}
    for piece in pieces:
        tied = _why_tied(draft, piece, [part.unit for part in parts[piece.name]])
        if tied:
            parts[piece.name] = (_whole(piece, tied),)
            draft = _on_one_lane(draft, piece, tied)
    return replace(draft, parts=_with_copies(draft, parts) if compiles else parts)


def _whole(piece: Unit, uncompiled: str) -> Part:
    leaving = tuple(True for _ in piece.outputs)
    return Part(unit=piece, uncompiled=uncompiled, leaving=leaving, copy_of=None, lane=0, waits=(), joins=False)


def _on_one_lane(draft: Draft, piece: Unit, reason: str) -> Draft:
    """Take a piece, and its copies, off the side lanes."""
    alike = [unit for unit in draft.units if draft.copies.get(unit.name, unit.name) == piece.name]
    nodes = {node for unit in alike for node in unit.nodes}
    if not draft.lanes.keys() & nodes:
        return draft
    lanes = {node: lane for node, lane in draft.lanes.items() if node not in nodes}
    return replace(draft, lanes=lanes, notes=(*draft.notes, f"{piece.name} runs on one lane: {reason}"))


def _with_copies(draft: Draft, parts: Mapping[str, Sequence[Part]]) -> dict[str, tuple[Part, ...]]:
    scalars = draft.scalars()
    first: dict[object, str] = {}

    def copy_of(part: Part) -> str | None:
        if part.uncompiled is not None:
            return None
        key = (piece_key(draft, part.unit, scalars), part.leaving)
        original = first.setdefault(key, part.unit.name)
        return None if original == part.unit.name else original

    return {name: tuple(replace(part, copy_of=copy_of(part)) for part in found) for name, found in parts.items()}


def why_opaque(draft: Draft, node: fx.Node) -> str | None:
    """The node calls an op that a piece compiler cannot see into, or must not leave out or move."""
    custom = custom_ops(draft, node)
    if custom:
        return f"calls {custom[0].removesuffix('.default')}"
    if draft.effects[node].random:
        return "draws random numbers"
    bodies = [arg.name for arg in node.all_input_nodes if is_body(draft, arg)]
    return f"runs the sub-graph {bodies[0]}" if bodies else None


def _cut(draft: Draft, piece: Unit, *, compiles: bool) -> tuple[Part, ...]:
    lanes = [draft.lanes.get(node, 0) for node in piece.nodes]
    events = events_of(order_of(piece.nodes, draft.effects), lanes)
    opaque = [compiles and why_opaque(draft, node) is not None for node in piece.nodes]
    overwritten = _overwritten(draft, piece.nodes) if compiles else [() for _ in piece.nodes]
    runs = list(_runs(opaque, lanes, events, overwritten))
    place = {op: index for index, run in enumerate(runs) for op in run} | {START: START}
    units = _units(draft, piece, runs)
    return tuple(
        Part(
            unit=unit,
            uncompiled=_why_uncompiled(draft, unit) if compiles else "there is no piece compiler",
            leaving=tuple(node in piece.outputs for node in unit.outputs),
            copy_of=None,
            lane=lanes[run[0]],
            waits=tuple(place[op] for op in events.waits[run[0]]),
            joins=run[-1] in events.joins,
        )
        for unit, run in zip(units, runs, strict=True)
    )


def _overwritten(draft: Draft, nodes: Sequence[fx.Node]) -> list[Sequence[Pair]]:
    """For each node, places of nodes before it that it may not share a part with, unless that also has another place.

    The former read, or made, what it overwrites; the latter made it (-1: whoever made it, it is no excuse).
    """
    made: dict[int, int] = {}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    found: list[Sequence[Pair]] = []
    for place, node in enumerate(nodes):
        effects = draft.effects[node]
        pairs = [(reader, made.get(old, -1)) for old in effects.writes for reader in readers[old]]
        if any(op.partition("::")[2].partition(".")[0].rstrip("_") in _PUTS for op in effects.ops):
            pairs += [(user, -1) for old in effects.reads for user in (*readers[old], made.get(old, -1))]
        found.append(pairs)
        for storage in effects.reads - effects.writes:
            readers[storage].append(place)
        for meta in pytree.tree_leaves(effects.result):
            if isinstance(meta, TensorMeta) and meta.storage not in effects.reads | effects.writes:
                made.setdefault(meta.storage, place)
    return found


def _runs(
    opaque: Sequence[bool], lanes: Sequence[int], events: Events, overwritten: Sequence[Sequence[Pair]]
) -> Iterator[list[int]]:
    """Places of the nodes of each part, ordered by their first."""
    awaited = {op for waits in events.waits for op in waits}
    runs: list[list[int]] = []
    open_run: dict[int, list[int]] = {}
    for op, lane in enumerate(lanes):
        run = open_run.get(lane, [])
        if not run or events.waits[op] or run[-1] in awaited or opaque[run[-1]] != opaque[op]:
            starts = True
        else:
            starts = not opaque[op] and any(user in run and maker not in run for user, maker in overwritten[op])
        if starts:
            run = open_run[lane] = []
            runs.append(run)
        run.append(op)
    yield from runs


def _units(draft: Draft, piece: Unit, runs: Sequence[Sequence[int]]) -> list[Unit]:
    parts: list[Run] = [("piece", tuple(piece.nodes[op] for op in run)) for run in runs]
    inside = {node: index for index, (_, nodes) in enumerate(parts) for node in nodes}
    home = {node: inside.get(node, -1) for node in draft.working_nodes()}
    shared = shared_allocations(draft, parts, home).union(draft.allocations)
    names = [f"{piece.name}.{index}" for index in range(len(parts))]
    return build_units(draft, parts, names, home, shared, frozenset(piece.outputs))


def _why_tied(draft: Draft, piece: Unit, parts: Sequence[Unit]) -> str | None:
    """Two values that cross between parts are one piece of memory, which compiled parts would tear apart."""
    owners: dict[int, str] = {}
    for node in dict.fromkeys((*piece.inputs, *(node for part in parts for node in part.outputs))):
        meta = draft.effects[node].result
        if isinstance(meta, TensorMeta):
            other = owners.setdefault(meta.storage, node.name)
            if other != node.name and node.op != "placeholder":
                return f"{node.name} shares memory with {other}, and both cross between its parts"
    return None


def _why_uncompiled(draft: Draft, unit: Unit) -> str | None:
    opaque = next(filter(None, (why_opaque(draft, node) for node in unit.body)), None)
    checks = (_why_useless, _why_lazy, _why_entangled, _why_layered, _why_outside)
    return opaque or next(filter(None, (check(draft, unit) for check in checks)), None)


def _why_useless(draft: Draft, unit: Unit) -> str | None:
    """A compiler would leave all of it out, and a capture be empty."""
    taken = {draft.storage_of(node) for node in unit.inputs}
    is_used = bool(unit.outputs) or any(draft.effects[node].writes & taken for node in unit.nodes)
    return None if is_used else "nothing takes its results"


def _why_lazy(draft: Draft, unit: Unit) -> str | None:
    """It takes an input of the graph that is conjugated or negated when it is read, of which stand-ins show nothing."""
    for graph_input in draft.inputs:
        value = graph_input.value
        if graph_input.node in unit.inputs and isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            return f"{graph_input.name} is conjugated or negated when it is read"
    return None


def _why_entangled(draft: Draft, unit: Unit) -> str | None:
    """It writes an input that shares memory with another one: a compiler takes inputs to be apart."""
    written = draft.written_by(unit)
    tensors = [(node, meta) for node in unit.inputs if isinstance(meta := draft.effects[node].result, TensorMeta)]
    for (first, meta), (second, other) in itertools.combinations(tensors, 2):
        if meta.storage == other.storage and meta.storage in written and not _are_apart(meta, other):
            return f"{first.name} and {second.name} may share memory, and it writes one of them"
    return None


def _why_layered(draft: Draft, unit: Unit) -> str | None:
    """It gives a value whose elements share memory, which cannot be written element by element."""
    for node in unit.outputs:
        meta = draft.effects[node].result
        if isinstance(meta, TensorMeta) and _is_layered(meta):
            return f"elements of {node.name} share memory"
    return None


def _why_outside(draft: Draft, unit: Unit) -> str | None:
    """It looks at memory around an input, of which a compiler knows nothing."""
    taken = {draft.storage_of(node) for node in unit.inputs}
    for node in unit.body:
        meta = draft.effects[node].result
        if strided_name(node) and isinstance(meta, TensorMeta) and meta.storage in taken:
            return f"{node.name} may show memory around what it is a view of"
    return None


def _is_layered(meta: TensorMeta) -> bool:
    """Whether two elements may lie at one address: ordered by stride, each has to step over all before it."""
    reach = 0
    steps = [(stride, size) for size, stride in zip(meta.shape, meta.stride, strict=True)]
    if not all(isinstance(number, int) for step in steps for number in step):
        return any(isinstance(stride, int) and stride == 0 for stride in meta.stride)
    for stride, size in sorted(steps):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _are_apart(first: TensorMeta, second: TensorMeta) -> bool:
    ranges = sorted(_extents((first, second)))
    return len(ranges) == 2 and ranges[0][1] <= ranges[1][0]


def _extents(metas: Sequence[TensorMeta]) -> Iterator[tuple[int, int]]:
    """First byte and the one behind the last, of those whose layout is known in numbers."""
    for meta in metas:
        numbers = pytree.tree_leaves((meta.shape, meta.stride, meta.offset))
        if any(isinstance(n, torch.SymInt) and not expr_of(n).is_number for n in numbers):
            continue
        start = int(meta.offset) * meta.dtype.itemsize
        reach = sum((int(size) - 1) * int(step) for size, step in zip(meta.shape, meta.stride, strict=True))
        yield start, start + (1 + reach) * meta.dtype.itemsize
