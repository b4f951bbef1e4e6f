"""Find pieces that are the same up to their weights, so that each is compiled once.

    piece_1: linear(h, w_1)     piece_2: linear(h, w_2)     ->    piece_2 is a duplicate of piece_1

Weights are inputs of a piece, so layers of one kind give equal pieces. Nearly equal ones (another constant, another
axis, another stride) never match: the key holds all of them.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph.partitioned import PartitionedGraph
from ..graph.unit_key import UnitKey, unit_key


def find_duplicates(graph: PartitionedGraph) -> PartitionedGraph:
    """Fill in `duplicates`: for each piece that is the same as an earlier one, the name of that one."""
    scalars = graph.traced.scalars()
    first: dict[UnitKey, str] = {}
    duplicates: dict[str, str] = {}
    for unit in graph.units:
        if unit.kind == "piece":
            original = first.setdefault(unit_key(graph.traced, unit, scalars), unit.name)
            if original != unit.name:
                duplicates[unit.name] = original
    return replace(graph, duplicates=duplicates)
