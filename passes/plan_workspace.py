"""Give a slot of the workspace to every value that a captured piece makes or needs, with the time it must live.

    piece_0 -> q (needed by region_0)             slot q:    units 0-1
    out = empty (region_0 fills, piece_1 reads)   slot out:  units 1-2
    x (a non-static input, read by piece_0)       slot x:    units -1-0, filled at the start of each call

Sizes are expressions of the size symbols; offsets are placed per bucket (`analysis/slot_placement.py`), since which of
two expressions is larger cannot be decided in general. What only regions and the caller see needs no slot: it is a
fresh tensor in every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..analysis.eager_reasons import inputs_shown_around
from ..graph.op_properties import is_wait
from ..graph.partitioned import InputRole, PartitionedGraph, Slot
from ..graph.traced import GraphInput, Provenance, TensorMeta, TracedGraph

START = -1  # before the first unit


def plan_workspace(graph: PartitionedGraph) -> PartitionedGraph:
    """Fill in `roles` and `slots`, and `uncaptured` where a value could not live in a slot."""
    taken_by_piece = {node for unit in graph.units if unit.kind == "piece" for node in unit.inputs}
    written = graph.traced.written()
    roles = {i.node: _role(graph, i, i.node in taken_by_piece, written) for i in graph.traced.inputs}
    slots = tuple(_slots(graph, roles, taken_by_piece))
    uncaptured = (
        graph.traced.run_as_traced
        or _why_uncaptured(slots)
        or _why_unwaited(graph)
        or _why_not_moved(graph.traced, written)
    )
    return replace(graph, roles=roles, slots=slots, uncaptured=uncaptured)


def _role(graph: PartitionedGraph, graph_input: GraphInput, taken_by_piece: bool, written: frozenset[int]) -> InputRole:
    meta = graph.traced.effects[graph_input.node].result
    if not isinstance(meta, TensorMeta):
        is_object = graph_input.provenance is Provenance.OBJECT
        return InputRole.DIRECT if is_object and not taken_by_piece else InputRole.NUMBER
    if graph_input.static:
        return InputRole.STATIC
    if not taken_by_piece:
        return InputRole.DIRECT
    return InputRole.BOUND if meta.storage in written else InputRole.COPIED_IN


def _slots(graph: PartitionedGraph, roles: Mapping[fx.Node, InputRole], taken_by_piece: set[fx.Node]) -> Iterator[Slot]:
    for node, role in roles.items():
        if role is InputRole.COPIED_IN:
            yield _slot(graph, node, START)
    for node in graph.allocations:
        yield _slot(graph, node, next(index for index, unit in enumerate(graph.units) if node in unit.inputs))
    for index, unit in enumerate(graph.units):
        for node in unit.outputs:
            if (unit.kind == "piece" or node in taken_by_piece) and _is_tensor(graph, node):
                yield _slot(graph, node, index)


def _is_tensor(graph: PartitionedGraph, node: fx.Node) -> bool:
    return isinstance(graph.traced.effects[node].result, TensorMeta)


def _slot(graph: PartitionedGraph, node: fx.Node, first: int) -> Slot:
    meta = graph.traced.effects[node].result
    assert isinstance(meta, TensorMeta), "only tensors have slots"
    return Slot(node=node, meta=meta, first=first, last=graph.last_use[node])


def _why_unwaited(graph: PartitionedGraph) -> str | None:
    """It waits for a collective that was started outside: what is copied in would be copied before."""
    for node in graph.traced.effects:
        if is_wait(node.target) and any(arg.op == "placeholder" for arg in node.all_input_nodes):
            return f"{node.all_input_nodes[0].name} is waited for, the collective was started outside of the graph"
    return None


def _why_uncaptured(slots: Sequence[Slot]) -> str | None:
    """Two slots would hold what is one piece of memory: a write to one would not show in the other."""
    owners: dict[int, str] = {}
    for slot in slots:
        other = owners.setdefault(slot.meta.storage, slot.node.name)
        if other != slot.node.name and slot.first >= 0:
            return f"{slot.node.name} shares memory with {other}, and both cross between pieces"
    return None


def _why_not_moved(traced: TracedGraph, written: frozenset[int]) -> str | None:
    """What the graph does cannot be done with a copy of a tensor, in another storage."""
    for node in inputs_shown_around(traced):
        if traced.storage_of(node) in written:
            return f"{node.name} is written, moves, and is viewed by places in its storage"
    asking = [node for node in traced.gm.graph.nodes if "untyped_storage" in getattr(node.target, "__name__", "")]
    return f"{asking[0].name} asks for the size of a storage" if asking else None
