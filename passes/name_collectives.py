"""Let every collective say where it is when it fails.

    t = all_reduce(x, "sum", "0")       ->    the same nodes; whoever runs one calls it through a `CollectiveCall`,
    w = wait_tensor(t)                        which knows the group and the user's line

The fault that a collective reports is most often one of another rank, so an error without op, group and line is of
little use. The graph that serves calls which break an assumption of the plan gets the same.
"""

from __future__ import annotations

from torch import fx

from ..compat.dispatch import OpOverload, OpOverloadPacket
from ..graph.collective_call import named_group, note_collective_call
from ..graph.op_properties import is_collective, is_wait
from ..graph.traced import TracedGraph
from .place_waits import awaited


def name_collectives(traced: TracedGraph) -> TracedGraph:
    """Note what each collective, and each wait for one, is called through."""
    for node, group in _collectives(traced.gm.graph):
        note_collective_call(node, group)
    for node in traced.original.graph.nodes:
        if isinstance(node.target, OpOverloadPacket) and len(node.target.overloads()) == 1:
            node.target = getattr(node.target, node.target.overloads()[0])
    for node, group in _collectives(traced.original.graph):
        node.target = note_collective_call(node, group)
    traced.original.recompile()
    return traced


def _collectives(graph: fx.Graph) -> list[tuple[fx.Node, object]]:
    """The nodes that call one, each with the group that it is of, or that of the one it waits for."""
    found = []
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and is_collective(node.target):
            started = awaited(node) if is_wait(node.target) else node
            found.append((node, None if started is None else named_group(started)))
    return found
