"""Check what a partition promises: each node in one place and in order, and nothing but bases and numbers crossing.

These are invariants of the plan, so a failure is a fault of this package; it is checked on every compilation, since a
wrong partition computes wrong numbers without an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import PlanError
from ..graph.partitioned import PartitionedGraph, Unit


def check_partition(graph: PartitionedGraph) -> PartitionedGraph:
    """Return the graph as it is.

    Raises:
        PlanError: names the unit and the node that break an invariant.
    """
    for complaint in (*_misplaced(graph), *_misordered(graph), *_bad_crossings(graph)):
        raise PlanError(f"the partition is wrong: {complaint}")
    return graph


def _misplaced(graph: PartitionedGraph) -> Iterator[str]:
    """Every compute node is in exactly one unit, in program order, with its fate; a unit has at least one."""
    placed = [node for unit in graph.units for node in unit.nodes]
    working = {node.name for node in placed}
    if placed != graph.traced.compute_nodes():
        yield "the units do not hold every compute node exactly once in program order"
    for unit in graph.units:
        if not unit.nodes:
            yield f"{unit.name} is empty"
        for node in unit.nodes:
            if (node in graph.traced.eager) != (unit.kind == "region"):
                yield f"{node.name} is in {unit.name} against the choice of regions"
        if _computed(unit, working) != [node.name for node in unit.nodes]:
            yield f"the graph of {unit.name} does not run exactly its own nodes"
    if computed := _computed(graph.output_assembly, working):
        yield f"the output assembly runs {computed[0]}"


def _computed(unit: Unit, working: set[str]) -> list[str]:
    """Names of the compute nodes a unit's graph runs, in order; copies keep the names of their originals."""
    nodes = [node for node in unit.gm.graph.nodes if node.op not in ("placeholder", "output")]
    return [node.name for node in nodes if node.name in working]


def _misordered(graph: PartitionedGraph) -> Iterator[str]:
    """A unit uses only inputs of the graph and what an earlier unit made."""
    given = {
        node
        for node in graph.traced.gm.graph.nodes
        if node.op == "placeholder" or graph.traced.effects[node].bucket_scalar
    }
    given |= set(graph.allocations)
    for unit in (*graph.units, graph.output_assembly):
        for node in unit.inputs:
            if node not in given:
                yield f"{unit.name} uses {node.name} before any unit makes it"
        given |= set(unit.outputs)


def _bad_crossings(graph: PartitionedGraph) -> Iterator[str]:
    """No container and no view crosses."""
    for unit in graph.units:
        for node in unit.outputs:
            effects = graph.traced.effects[node]
            if isinstance(effects.result, tuple):
                yield f"{unit.name} outputs {node.name}, a container"
            elif effects.is_view and graph.traced.producer(node) is node:
                yield f"{unit.name} outputs {node.name}, a view"
