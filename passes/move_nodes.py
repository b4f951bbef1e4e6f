"""Under minimal: clear captured nodes out of the eager regions, so that the fewest regions remain.

    prep; mm; attn; y = x * 3; tick         ->   mm; prep; attn; tick; y = x * 3
    (eager, captured, eager, captured, eager)     (one piece, one region, one piece)

Nodes are laid out in alternating phases, captured and eager in turn: 0, 1, 2, ... An eager node takes the earliest
phase that its dependences allow, which gives the fewest phases; a captured node takes the one nearest to where it
stood, between those of its predecessors and successors. Inside a phase the program order is kept. What may pass what
is decided by the effect sets alone, and a checker that does not use the same edges compares the two orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import fx

from ..analysis.dependencies import predecessors, signature
from ..errors import PlanError
from ..graph.traced import TracedGraph

Edges = Mapping[fx.Node, set[fx.Node]]


def move_nodes(traced: TracedGraph, *, region: str) -> TracedGraph:
    """Reorder the graph (minimal only).

    Raises:
        PlanError: the new order would change what some node sees; a fault of this pass.
    """
    if region != "minimal" or not traced.eager:
        return traced
    before = traced.compute_nodes()
    after = order_by_phase(before, traced.eager, _with_eager_order(before, traced))
    check_same_meaning(before, after, traced)
    _reorder(traced.gm.graph, after)
    return traced


def _with_eager_order(nodes: Sequence[fx.Node], traced: TracedGraph) -> Edges:
    """The dependences, and the program order of the eager nodes: a split op may keep state that no schema shows."""
    edges = predecessors(nodes, traced.effects)
    for before, after in itertools.pairwise(node for node in nodes if node in traced.eager):
        edges[after].add(before)
    return edges


def order_by_phase(nodes: Sequence[fx.Node], eager: Mapping[fx.Node, str], edges: Edges) -> list[fx.Node]:
    """The nodes in phases; even phases are captured, odd ones eager."""
    earliest = _earliest(nodes, eager, edges)
    latest = _latest(nodes, eager, edges, earliest)
    phase: dict[fx.Node, int] = {}
    reached = 0  # the phase that the eager nodes seen so far have got to
    for node in nodes:
        least = _least_phase(node, eager, edges, phase)
        if node in eager:
            phase[node] = least
            reached = max(reached, least)
        else:
            wanted = reached + 1 if reached % 2 else reached
            phase[node] = max(least, min(wanted, latest[node]))
    return sorted(nodes, key=lambda node: phase[node])  # stable: program order within a phase


def _earliest(nodes: Sequence[fx.Node], eager: Mapping[fx.Node, str], edges: Edges) -> dict[fx.Node, int]:
    phase: dict[fx.Node, int] = {}
    for node in nodes:
        phase[node] = _least_phase(node, eager, edges, phase)
    return phase


def _least_phase(node: fx.Node, eager: Mapping[fx.Node, str], edges: Edges, phase: Mapping[fx.Node, int]) -> int:
    """Not before any predecessor, and of the node's own parity."""
    least = max((phase[before] for before in edges[node]), default=0)
    return least + 1 if least % 2 != (node in eager) else least


def _latest(
    nodes: Sequence[fx.Node], eager: Mapping[fx.Node, str], edges: Edges, earliest: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """The last phase in which a captured node delays no eager node beyond its earliest phase."""
    end = max(earliest.values(), default=0) + 1
    latest = {node: earliest[node] if node in eager else end + end % 2 for node in nodes}
    for node in reversed(nodes):
        for before in edges[node]:
            if before not in eager:
                bound = latest[node] - 1 if node in eager else latest[node]
                latest[before] = min(latest[before], bound)
    return latest


def check_same_meaning(before: Sequence[fx.Node], after: Sequence[fx.Node], traced: TracedGraph) -> None:
    """Raise PlanError unless every node sees in the new order what it saw in the old one."""
    if len(after) != len(before) or set(after) != set(before):
        raise PlanError("a move lost or doubled a node")
    if [node for node in after if node in traced.eager] != [node for node in before if node in traced.eager]:
        raise PlanError("a move changed the order of the eager nodes")
    old, new = signature(before, traced.effects), signature(after, traced.effects)
    for node in before:
        if old[node] != new[node]:
            raise PlanError(f"moving {node.name} changed what it sees: it conflicts with a node it passed")


def _reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the compute nodes in this order, each right after the view nodes that only it still waits for."""
    fixed = {node for node in graph.nodes if node.op in ("placeholder", "get_attr", "output")}
    placed = set(fixed)
    output = graph.output_node()
    for node in order:
        _place(node, placed, output)
    for node in list(graph.nodes):
        if node not in placed:
            _place(node, placed, output)


def _place(wanted: fx.Node, placed: set[fx.Node], output: fx.Node) -> None:
    """Put a node after all that it needs; with a stack, since a chain of views may be long."""
    stack = [wanted]
    while stack:
        node = stack[-1]
        missing = [arg for arg in node.all_input_nodes if arg not in placed]
        if missing:
            stack.extend(reversed(missing))
            continue
        stack.pop()
        if node not in placed:
            output.prepend(node)
            placed.add(node)
