"""Say on which stream each node of a piece runs, so that independent branches run side by side.

    stream 0    fused GEMM    norm    q GEMM            q norm, KV insert
    stream 1    side GEMM             indexer q GEMM    indexer RoPE
    stream 2    side GEMM     compressor insert

Branches come from the effects: what a node must come after (data, conflicting accesses, random draws, barriers) it
comes after on any stream. Streams fork from stream 0 and join into it inside of one piece, so every region starts with
all work joined. Who runs where is decided once per graph, by costs at the sizes of the trace (`cost_model.py`,
`stream_schedule.py`); which buckets use the streams is decided when they are captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..analysis.cost_model import cost_of
from ..analysis.dependencies import predecessors
from ..analysis.stream_schedule import schedule
from ..config import Config
from ..graph.partitioned import PartitionedGraph, Unit
from ..graph.traced import Effects


def assign_streams(graph: PartitionedGraph, *, config: Config) -> PartitionedGraph:
    """Fill in `streams`; without side streams the graph stays as it is."""
    side_streams = config.resolved_aux_streams(graph.traced.device.type)
    if not side_streams:
        return graph
    pieces = {unit.name: unit for unit in graph.units if unit.kind == "piece"}
    originals = {
        name: _streams(graph, unit, side_streams) for name, unit in pieces.items() if name not in graph.duplicates
    }
    streams: dict[fx.Node, int] = {}
    for name, unit in pieces.items():
        # a duplicate runs the code of its original, so its nodes run where those at the same positions do
        placed = zip(unit.nodes, originals[graph.duplicates.get(name, name)], strict=True)
        streams |= {node: stream for node, stream in placed if stream}
    return replace(graph, streams=streams)


def order_of(nodes: Sequence[fx.Node], effects: Mapping[fx.Node, Effects]) -> list[set[int]]:
    """For each node of a run, the indices of the earlier ones in it that it must come after."""
    indices = {node: index for index, node in enumerate(nodes)}
    return [{indices[other] for other in earlier} for earlier in predecessors(nodes, effects).values()]


def _streams(graph: PartitionedGraph, unit: Unit, side_streams: int) -> tuple[int, ...]:
    costs = [cost_of(graph.traced, node) for node in unit.nodes]
    return schedule(order_of(unit.nodes, graph.traced.effects), costs, side_streams)
