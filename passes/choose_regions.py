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

from ..draft import Draft
from ..reasons import graph_facts, is_preparation, why_not_capturable, why_reads_step, why_split

BETWEEN = "wide: between preparation and split op"
NO_SPLIT_OP = "the graph calls no split op: nothing in it is kept eager for attention"


def choose_regions(draft: Draft, *, runner: str, region: str) -> Draft:
    """Fill in `eager`: a reason for every node that runs eagerly; note a graph without a split op."""
    nodes = draft.working_nodes()
    splits = {node: reason for node in nodes if (reason := why_split(draft, node))}
    facts = graph_facts(draft)
    eager = dict(splits)
    readers_are_eager = region == "minimal" and runner == "mrv1"
    for node in nodes:
        reason = why_not_capturable(draft, node, facts)
        if reason is None and readers_are_eager:
            reason = why_reads_step(draft, node)
        if reason is not None:
            eager.setdefault(node, reason)
    if region == "wide":
        _widen(draft, nodes, splits, eager)
    return replace(draft, eager=eager, notes=draft.notes if splits else (*draft.notes, NO_SPLIT_OP))


def _widen(draft: Draft, nodes: Sequence[fx.Node], splits: dict[fx.Node, str], eager: dict[fx.Node, str]) -> None:
    """Make eager all that lies between the first preparation op of a region and its last split op.

    A preparation op with no split op behind it is a region by itself, and so is a split op with none before it.
    """
    start: int | None = None
    last_split: int | None = None
    for index, node in enumerate(nodes):
        if node in splits:
            last_split = index
        elif is_preparation(draft, node):
            eager.setdefault(node, why_reads_step(draft, node) or "preparation op")
            if last_split is not None:
                _fill(nodes, start, last_split, eager)
                start = last_split = None
            start = index if start is None else start
    if last_split is not None:
        _fill(nodes, start, last_split, eager)


def _fill(nodes: Sequence[fx.Node], start: int | None, last_split: int, eager: dict[fx.Node, str]) -> None:
    for node in nodes[last_split if start is None else start : last_split]:
        eager.setdefault(node, BETWEEN)
