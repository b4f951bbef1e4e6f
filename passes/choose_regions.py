"""Decide which nodes run eagerly, and say why for each.

    narrow    split ops only
    wide      from the first preparation op after the previous region to the last split op before the next one
    minimal   what must be eager under this runner; `move_nodes` then clears captured nodes out of the way

Whatever the policy, a node that a graph cannot hold (it syncs, its size depends on data, it works on the CPU in a
device graph) is eager too. Under wide, and under minimal with the old runner (mrv1), so are the readers of step state
and of the step context: that runner replaces their tensors every step. Narrow leaves them captured, and
`check_hazards` refuses the plan if the runner does not allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..analysis.eager_reasons import graph_facts, is_preparation, why_not_capturable, why_reads_step, why_split
from ..graph.op_properties import is_collective, is_wait
from ..graph.traced import TracedGraph
from .place_waits import awaited

BETWEEN = "wide: between preparation and split op"
CHECKED_COLLECTIVE = 'a collective runs once a call, and check="full" runs what is captured twice'
NO_SPLIT_OP = "the graph calls no split op: nothing in it is kept eager for attention"


def choose_regions(traced: TracedGraph, *, runner: str, region: str, runs_twice: bool = False) -> TracedGraph:
    """Fill in `eager`: a reason for every node that runs eagerly; note a graph without a split op.

    Args:
        traced: the graph.
        runner, region: the policy.
        runs_twice: what is captured also runs uncaptured in every call, to compare.
    """
    nodes = traced.compute_nodes()
    if traced.run_as_traced is not None:
        return replace(traced, eager=dict.fromkeys(nodes, traced.run_as_traced))
    splits = {node: reason for node in nodes if (reason := why_split(traced, node))}
    facts = graph_facts(traced)
    eager = dict(splits)
    readers_are_eager = region == "minimal" and runner == "mrv1"
    for node in nodes:
        reason = traced.refused.get(node) or why_not_capturable(traced, node, facts)
        if reason is None and readers_are_eager:
            reason = why_reads_step(traced, node)
        if reason is not None:
            eager.setdefault(node, reason)
    if region == "wide":
        _widen(traced, nodes, splits, eager)
    _settle_collectives(nodes, eager, runs_twice=runs_twice)
    return replace(traced, eager=eager, notes=traced.notes if splits else (*traced.notes, NO_SPLIT_OP))


def _settle_collectives(nodes: Sequence[fx.Node], eager: dict[fx.Node, str], *, runs_twice: bool) -> None:
    """What is started in a graph is waited for in it; and what the other processes do once is done once here."""
    waits = {node: awaited(node) for node in nodes if is_wait(node.target)}
    for node in nodes:
        if runs_twice and is_collective(node.target):
            eager.setdefault(node, CHECKED_COLLECTIVE)
    for wait, started in waits.items():
        if started is not None and (reason := eager.get(started) or eager.get(wait)):
            eager.setdefault(started, reason)
            eager.setdefault(wait, reason)


def _widen(
    traced: TracedGraph, nodes: Sequence[fx.Node], splits: dict[fx.Node, str], eager: dict[fx.Node, str]
) -> None:
    """Make eager all that lies between the first preparation op of a region and its last split op.

    A preparation op with no split op after it is a region by itself, and so is a split op with none before it.
    """
    start: int | None = None
    last_split: int | None = None
    for index, node in enumerate(nodes):
        if node in splits:
            last_split = index
        elif is_preparation(traced, node):
            eager.setdefault(node, why_reads_step(traced, node) or "preparation op")
            if last_split is not None:
                _fill(nodes, start, last_split, eager)
                start = last_split = None
            start = index if start is None else start
    if last_split is not None:
        _fill(nodes, start, last_split, eager)


def _fill(nodes: Sequence[fx.Node], start: int | None, last_split: int, eager: dict[fx.Node, str]) -> None:
    for node in nodes[last_split if start is None else start : last_split]:
        eager.setdefault(node, BETWEEN)
