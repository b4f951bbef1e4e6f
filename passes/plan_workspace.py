"""Give a slot of the workspace to every value that a captured piece makes or takes, with the time it must live.

    piece_0 -> q (taken by region_0)             slot q:    units 0-1
    out = empty (region_0 fills, piece_1 reads)  slot out:  units 1-2
    x (a graph input that moves, read by piece_0) slot x:   units -1-0, filled at the start of each call

Sizes are expressions of the size symbols; offsets are placed per bucket (`runtime/workspace.py`), since which of two
expressions is larger cannot be decided in general. What only regions and the caller see needs no slot: it is a fresh
tensor in every call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..draft import Draft, GraphInput, InputRole, Slot, TensorMeta

START = -1  # before the first unit


def plan_workspace(draft: Draft) -> Draft:
    """Fill in `roles` and `slots`, and `uncaptured` where a value that crosses shares memory with another."""
    taken_by_piece = {node for unit in draft.units if unit.kind == "piece" for node in unit.inputs}
    written = draft.written()
    roles = {i.node: _role(draft, i, i.node in taken_by_piece, written) for i in draft.inputs}
    slots = tuple(_slots(draft, roles, taken_by_piece))
    return replace(draft, roles=roles, slots=slots, uncaptured=_why_uncaptured(slots))


def _role(draft: Draft, graph_input: GraphInput, taken_by_piece: bool, written: frozenset[int]) -> InputRole:
    meta = draft.effects[graph_input.node].result
    if not isinstance(meta, TensorMeta):
        return InputRole.NUMBER
    if graph_input.static:
        return InputRole.STATIC
    if not taken_by_piece:
        return InputRole.DIRECT
    return InputRole.BOUND if meta.storage in written else InputRole.STAGED


def _slots(draft: Draft, roles: Mapping[fx.Node, InputRole], taken_by_piece: set[fx.Node]) -> Iterator[Slot]:
    takers = _takers(draft)
    for node, role in roles.items():
        if role is InputRole.STAGED:
            yield _slot(draft, node, START, takers[node][-1])
    for node in draft.allocations:
        yield _slot(draft, node, takers[node][0], takers[node][-1])
    for index, unit in enumerate(draft.units):
        for node in unit.outputs:
            if (unit.kind == "piece" or node in taken_by_piece) and _is_tensor(draft, node):
                yield _slot(draft, node, index, takers[node][-1])


def _takers(draft: Draft) -> Mapping[fx.Node, Sequence[int]]:
    """The units that take a value, in order; the epilogue counts as one after all others."""
    assert draft.epilogue is not None, "the graph is partitioned by now"
    takers: defaultdict[fx.Node, list[int]] = defaultdict(list)
    for index, unit in enumerate((*draft.units, draft.epilogue)):
        for node in unit.inputs:
            takers[node].append(index)
    return takers


def _is_tensor(draft: Draft, node: fx.Node) -> bool:
    return isinstance(draft.effects[node].result, TensorMeta)


def _slot(draft: Draft, node: fx.Node, first: int, last: int) -> Slot:
    meta = draft.effects[node].result
    assert isinstance(meta, TensorMeta), "only tensors have slots"
    return Slot(node=node, meta=meta, first=first, last=last)


def _why_uncaptured(slots: Sequence[Slot]) -> str | None:
    """Two slots would hold what is one piece of memory: a write to one would not show in the other."""
    owners: dict[int, str] = {}
    for slot in slots:
        other = owners.setdefault(slot.meta.storage, slot.node.name)
        if other != slot.node.name and slot.first >= 0:
            return f"{slot.node.name} shares memory with {other}, and both cross between pieces"
    return None
