"""Plan the step once more as a single piece, for calls of uniform decode.

    piece_0: mm | region_0: attn | piece_1: mm        calls of any batch
    whole_step: mm, attn, mm                          calls in a block of `uniform_decode`

That takes a promise of each split op (`register_op(capturable=)`), and nothing else that has to be eager. What is
planned is the same graph, in the same order, with the same effects, and it goes through the same passes and checks; so
does the hazard check, which judges every node of it as captured. Where it cannot be, calls of uniform decode run as all
others do: the plan says why, and `decode="full"` makes an error of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..analysis.full_graph import splits_of, whole_step, why_not_whole
from ..config import Config
from ..errors import FullGraphError, HazardError
from ..graph.partitioned import PartitionedGraph
from ..graph.source_lines import where
from ..graph.traced import TracedGraph
from .check_hazards import hazards_of
from .partition_graph import partition_graph

NAME = "whole_step"
SHOWN = 4  # reasons; layers that are alike repeat them

_CURE = (
    'Register split ops that keep to its rules with capturable="decode", take the rest out of what is compiled, or use '
    'decode="auto", with which such a graph runs in pieces'
)
_HAZARD_CURE = 'use decode="auto", or runner="mrv2" if the runner keeps its step state in persistent buffers'


def add_full_graph(
    graph: PartitionedGraph, *, config: Config, passes: Sequence[Callable[[PartitionedGraph], PartitionedGraph]]
) -> PartitionedGraph:
    """Fill in `full`, or `no_full` where somebody might expect it.

    Args:
        graph: as it is partitioned for calls of any batch.
        config: the options.
        passes: what a partitioned graph goes through.

    Raises:
        FullGraphError: with decode="full", the step cannot be one piece; names all that is in the way.
        HazardError: with decode="full", captured nodes would read what the runner replaces.
    """
    if not _is_wanted(graph.traced, config):
        return graph
    whole = whole_step(graph.traced)
    reasons = list(why_not_whole(whole))
    hazards = list(_hazards(whole)) if config.resolved_runner == "mrv1" else []
    must_be = config.decode == "full" and not graph.traced.refused  # later, a call is on its way
    if reasons and must_be:
        raise FullGraphError(f'decode="full", but the whole step cannot be one graph: {_listed(reasons)}. {_CURE}')
    if hazards and must_be:
        raise HazardError(f'with decode="full", {hazards[0]}: {_HAZARD_CURE}')
    reasons += hazards
    if reasons:
        return replace(graph, no_full=_listed(reasons))
    full = partition_graph(whole, names=lambda runs: [NAME, "output assembly"])
    for transform in passes:
        full = transform(full)
    if (reason := graph.uncaptured or full.uncaptured) is None:
        return replace(graph, full=full)
    if must_be:
        raise FullGraphError(f'decode="full", but no call of this graph can be captured: {reason}. {_CURE}')
    return replace(graph, no_full=reason)


def _hazards(whole: TracedGraph) -> Iterator[str]:
    for node in whole.compute_nodes():
        for hazard in hazards_of(whole, node):
            yield f"{hazard}, but it would be captured under mrv1, at {where(node)}"


def _is_wanted(traced: TracedGraph, config: Config) -> bool:
    """Asked for, or allowed by a split op; a graph with nothing eager in it is one piece as it is."""
    if config.decode == "full" or not traced.eager:
        return bool(traced.eager)
    if config.decode == "piecewise" or all(op.capturable == "never" for op in traced.ops.values()):
        return False
    return any(promise != "never" for ops in splits_of(traced).values() for promise in ops.values())


def _listed(reasons: Iterable[str]) -> str:
    found = list(reasons)
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more
