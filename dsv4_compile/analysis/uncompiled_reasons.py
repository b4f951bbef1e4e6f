"""Why a subgraph of a piece is not compiled, or a node may not be in one: None, or a phrase that is shown as is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from ..compat.dispatch import pytree
from ..compat.symbols import Size, expr_of
from ..graph.fused_call import FusedCall
from ..graph.joined_call import JoinedCall
from ..graph.op_properties import checks_data, strided_name
from ..graph.partitioned import Unit
from ..graph.traced import TensorMeta, TracedGraph
from .eager_reasons import custom_ops, is_body, why_split


def why_opaque(traced: TracedGraph, node: fx.Node) -> str | None:
    """The node calls an op that a piece compiler cannot see into, or must not leave out or move."""
    custom = custom_ops(traced, node)
    if custom:
        return f"calls {custom[0].removesuffix('.default')}"
    if why_split(traced, node) is not None:
        return "calls a split op"  # made of torch's own ops; in a full graph it is captured, and what it is stays
    if any(map(checks_data, traced.effects[node].ops)):
        return "checks data"  # a compiler may leave out what gives no result
    if isinstance(node.target, FusedCall):
        return f"runs a {node.target.__name__}"
    if isinstance(node.target, JoinedCall):
        return f"has results of {node.target.__name__} that share memory"
    if traced.effects[node].random:
        return "draws random numbers"
    bodies = [arg.name for arg in node.all_input_nodes if is_body(traced, arg)]
    return f"runs the sub-graph {bodies[0]}" if bodies else None


def why_uncompiled(traced: TracedGraph, unit: Unit) -> str | None:
    """The subgraph runs as it is: no compiler would make of it what it does."""
    opaque = next(filter(None, (why_opaque(traced, node) for node in unit.body)), None)
    checks = (_why_unused, _why_lazy_value, _why_inputs_alias, _why_internal_overlap, _why_reads_around)
    return opaque or next(filter(None, (check(traced, unit) for check in checks)), None)


def _why_unused(traced: TracedGraph, unit: Unit) -> str | None:
    """A compiler would leave all of it out, and the captured graph be empty."""
    given = {traced.storage_of(node) for node in unit.inputs}
    is_used = bool(unit.outputs) or any(traced.effects[node].writes & given for node in unit.nodes)
    return None if is_used else "nothing uses its results"


def _why_lazy_value(traced: TracedGraph, unit: Unit) -> str | None:
    """A value is conjugated or negated only when it is read: compiled code does not know, or not how to write it."""
    names = {graph_input.node: graph_input.name for graph_input in traced.inputs}
    for node in (*unit.inputs, *unit.body):
        meta = traced.effects[node].result
        if isinstance(meta, TensorMeta) and (meta.conj or meta.neg):
            return f"{names.get(node, node.name)} is conjugated or negated when it is read"
    return None


def _why_inputs_alias(traced: TracedGraph, unit: Unit) -> str | None:
    """It writes an input that shares memory with another one: a compiler assumes that inputs are disjoint."""
    written = traced.written_by(unit.nodes)
    tensors = [(node, meta) for node in unit.inputs if isinstance(meta := traced.effects[node].result, TensorMeta)]
    for (first, meta), (second, other) in itertools.combinations(tensors, 2):
        if meta.storage == other.storage and meta.storage in written and not _are_disjoint(meta, other):
            return f"{first.name} and {second.name} may share memory, and it writes one of them"
    return None


def _why_internal_overlap(traced: TracedGraph, unit: Unit) -> str | None:
    """An output has elements that share memory, which cannot be written element by element."""
    for node in unit.outputs:
        meta = traced.effects[node].result
        if isinstance(meta, TensorMeta) and _has_internal_overlap(meta):
            return f"elements of {node.name} share memory"
    return None


def _why_reads_around(traced: TracedGraph, unit: Unit) -> str | None:
    """It looks at memory around an input, of which a compiler knows nothing."""
    given = {traced.storage_of(node) for node in unit.inputs}
    for node in unit.body:
        meta = traced.effects[node].result
        if strided_name(node) and isinstance(meta, TensorMeta) and meta.storage in given:
            return f"{node.name} may show memory around what it is a view of"
    return None


def _has_internal_overlap(meta: TensorMeta) -> bool:
    """Whether two elements may lie at one address: ordered by stride, each has to step over all before it."""
    reach: Size = 0
    steps = [(stride, size) for size, stride in zip(meta.shape, meta.stride, strict=True)]
    if not all(isinstance(number, int) for step in steps for number in step):
        return any(isinstance(stride, int) and stride == 0 for stride in meta.stride)
    for stride, size in sorted(steps):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _are_disjoint(first: TensorMeta, second: TensorMeta) -> bool:
    ranges = sorted(_known_extents((first, second)))
    return len(ranges) == 2 and ranges[0][1] <= ranges[1][0]


def _known_extents(metas: Sequence[TensorMeta]) -> Iterator[tuple[int, int]]:
    """The first byte and the one after the last, of those whose layout is known in numbers."""
    for meta in metas:
        numbers = pytree.tree_leaves((meta.shape, meta.stride, meta.offset))
        if any(isinstance(n, torch.SymInt) and not expr_of(n).is_number for n in numbers):
            continue
        start = int(meta.offset) * meta.dtype.itemsize
        reach = sum((int(size) - 1) * int(step) for size, step in zip(meta.shape, meta.stride, strict=True))
        yield start, start + (1 + reach) * meta.dtype.itemsize
