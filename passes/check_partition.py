"""Check what a partition promises: each node in one place and in order, and nothing but bases and numbers crossing.

These are invariants of the plan, so a failure is a fault of this package; it is checked on every compilation, since a
wrong partition computes wrong numbers without an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..draft import Draft, Unit
from ..errors import PlanError


def check_partition(draft: Draft) -> Draft:
    """Return the draft as it is.

    Raises:
        PlanError: names the unit and the node that break an invariant.
    """
    for complaint in (*_misplaced(draft), *_misordered(draft), *_bad_crossings(draft)):
        raise PlanError(f"the partition is wrong: {complaint}")
    return draft


def _misplaced(draft: Draft) -> Iterator[str]:
    """Every working node is in exactly one unit, in program order, with its fate; a unit has at least one."""
    placed = [node for unit in draft.units for node in unit.nodes]
    working = {node.name for node in placed}
    if placed != draft.working_nodes():
        yield "the units do not hold every working node exactly once in program order"
    for unit in draft.units:
        if not unit.nodes:
            yield f"{unit.name} is empty"
        for node in unit.nodes:
            if (node in draft.eager) != (unit.kind == "region"):
                yield f"{node.name} is in {unit.name} against the choice of regions"
        if _computed(unit, working) != [node.name for node in unit.nodes]:
            yield f"the graph of {unit.name} does not run exactly its own nodes"
    assert draft.epilogue is not None, "the graph is partitioned by now"
    if computed := _computed(draft.epilogue, working):
        yield f"the epilogue runs {computed[0]}"


def _computed(unit: Unit, working: set[str]) -> list[str]:
    """Names of the working nodes a unit's graph runs, in order; copies keep the names of their originals."""
    nodes = [node for node in unit.gm.graph.nodes if node.op not in ("placeholder", "output")]
    return [node.name for node in nodes if node.name in working]


def _misordered(draft: Draft) -> Iterator[str]:
    """A unit takes only inputs of the graph and what an earlier unit gave."""
    given = {node for node in draft.gm.graph.nodes if node.op == "placeholder" or draft.effects[node].bucket_scalar}
    given |= set(draft.allocations)
    assert draft.epilogue is not None, "the graph is partitioned by now"
    for unit in (*draft.units, draft.epilogue):
        for node in unit.inputs:
            if node not in given:
                yield f"{unit.name} takes {node.name} before any unit gives it"
        given |= set(unit.outputs)


def _bad_crossings(draft: Draft) -> Iterator[str]:
    """No container and no view crosses."""
    for unit in draft.units:
        for node in unit.outputs:
            effects = draft.effects[node]
            if isinstance(effects.result, tuple):
                yield f"{unit.name} gives {node.name}, a container"
            elif effects.is_free and draft.producer(node) is node:
                yield f"{unit.name} gives {node.name}, a view"
