"""Say on which lane each node of a piece runs, so that independent branches run side by side.

    lane 0    fused GEMM    norm    q GEMM            q norm, KV insert
    lane 1    side GEMM             indexer q GEMM    indexer RoPE
    lane 2    side GEMM     compressor insert

Branches come from the effects: what a node must stay behind (data, conflicting accesses, random draws, barriers) it
stays behind on any lane. Lanes fork from lane 0 and join into it inside of one piece, so every region starts with all
work joined. Who runs where is decided once per graph, by weights at the sizes of the trace (`lane_weights.py`,
`lane_schedule.py`); which buckets use the lanes is decided when they are captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..config import Config
from ..dependence import predecessors
from ..draft import Draft, Effects, Unit
from ..lane_schedule import schedule
from ..lane_weights import weight_of
from ..reasons import graph_device


def assign_lanes(draft: Draft, *, config: Config) -> Draft:
    """Fill in `lanes`; without side lanes the draft stays as it is."""
    side_lanes = config.resolved_aux_streams(graph_device(draft).type)
    if not side_lanes:
        return draft
    pieces = {unit.name: unit for unit in draft.units if unit.kind == "piece"}
    originals = {name: _lanes(draft, unit, side_lanes) for name, unit in pieces.items() if name not in draft.copies}
    lanes: dict[fx.Node, int] = {}
    for name, unit in pieces.items():
        # a copy runs the code of its original, so its nodes run where those at the same places do
        placed = zip(unit.nodes, originals[draft.copies.get(name, name)], strict=True)
        lanes |= {node: lane for node, lane in placed if lane}
    return replace(draft, lanes=lanes)


def order_of(nodes: Sequence[fx.Node], effects: Mapping[fx.Node, Effects]) -> list[set[int]]:
    """For each node of a run, the places of the earlier ones in it that it must stay behind."""
    places = {node: place for place, node in enumerate(nodes)}
    return [{places[earlier] for earlier in behind} for behind in predecessors(nodes, effects).values()]


def _lanes(draft: Draft, unit: Unit, side_lanes: int) -> tuple[int, ...]:
    weights = [weight_of(draft, node) for node in unit.nodes]
    return schedule(order_of(unit.nodes, draft.effects), weights, side_lanes)
