"""Cut each piece into parts: what the piece compiler gets, and the custom ops between, which it must not see.

    piece_0: mm, rope!, mul, sum        ->    piece_0.0: mm | piece_0.1: rope! | piece_0.2: mul, sum
             (rope is a custom op)            (compiled)      (as it is)         (compiled)

The piece is still captured as one graph. Two things force the cuts. Inductor may compute a value again after an opaque
op has changed what it was computed from, and its cache on disk does not know the schemas of custom ops, so a changed
one gives the wrong numbers in the next process. And an op that is implemented in Python has to be recorded op by op,
which a compiled function around it would hide. Nothing is lost: no compiler fuses across an op it cannot see into.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..compat import expr_of
from ..config import Config
from ..draft import Draft, Part, TensorMeta, Unit
from ..reasons import custom_ops, graph_device
from .partition_graph import Run, build_units, shared_allocations


def cut_pieces(draft: Draft, *, config: Config) -> Draft:
    """Fill in `parts` for every piece that is not a copy of another one; without a piece compiler nothing is cut."""
    if config.resolved_piece_compiler(graph_device(draft).type) == "eager" or draft.uncaptured is not None:
        return draft
    pieces = [unit for unit in draft.units if unit.kind == "piece" and unit.name not in draft.copies]
    return replace(draft, parts={piece.name: _cut(draft, piece) for piece in pieces})


def why_opaque(draft: Draft, node: fx.Node) -> str | None:
    """The node calls an op that a piece compiler cannot see into."""
    custom = custom_ops(draft, node)
    if custom:
        return f"calls {custom[0].removesuffix('.default')}"
    bodies = [arg.name for arg in node.all_input_nodes if _is_body(draft, arg)]
    return f"runs the sub-graph {bodies[0]}" if bodies else None


def _is_body(draft: Draft, arg: fx.Node) -> bool:
    return arg.op == "get_attr" and draft.effects[arg].result is None


def _cut(draft: Draft, piece: Unit) -> tuple[Part, ...]:
    grouped = itertools.groupby(piece.nodes, key=lambda node: why_opaque(draft, node) is not None)
    runs: list[Run] = [("piece", tuple(nodes)) for _, nodes in grouped]
    inside = {node: index for index, (_, nodes) in enumerate(runs) for node in nodes}
    home = {node: inside.get(node, -1) for node in draft.working_nodes()}
    shared = shared_allocations(draft, runs, home).union(draft.allocations)
    names = [f"{piece.name}.{index}" for index in range(len(runs))]
    units = build_units(draft, runs, names, home, shared, frozenset(piece.outputs))
    tied = _why_tied(draft, piece, units)
    return tuple(Part(unit=unit, uncompiled=tied or _why_uncompiled(draft, unit)) for unit in units)


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
    opaque = next(filter(None, (why_opaque(draft, node) for node in unit.nodes)), None)
    return opaque or _why_entangled(draft, unit) or _why_layered(draft, unit)


def _why_entangled(draft: Draft, unit: Unit) -> str | None:
    """It writes an input that shares memory with another one: a compiler takes inputs to be apart."""
    written = {storage for node in unit.nodes for storage in draft.effects[node].writes}
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
