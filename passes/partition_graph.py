"""Cut the graph into pieces and regions: maximal runs of compute nodes with one fate, in program order.

    mm, (view), attn!, (view), mqa!, mm     ->    piece_0: mm | region_0: attn, mqa | piece_1: mm

View nodes join no run: each unit that needs a view computes it from the base (a view made before a mutation shows it
just the same), so only tensors that own their memory, and numbers, cross. An allocation that several units touch is
made outside of all of them, since it stands for a slot of the workspace. Every run holds a compute node, so there is no
empty piece and none of views or allocations alone. The output
assembly is what is left: views that only the caller sees.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import fx

from ..analysis.token_count import token_count
from ..graph.build_units import Run, build_units, shared_allocations
from ..graph.partitioned import PartitionedGraph, Unit
from ..graph.traced import TracedGraph


def partition_graph(
    traced: TracedGraph, *, names: Callable[[Sequence[Run]], Sequence[str]] | None = None
) -> PartitionedGraph:
    """Make the units, and say what crosses between them and how long it is needed.

    Args:
        traced: the graph.
        names: gives the units their names, the output assembly last; None: numbers them by kind.
    """
    runs: list[Run] = [*_runs(traced), ("output assembly", ())]
    home = {node: index for index, (_, nodes) in enumerate(runs) for node in nodes}
    shared = shared_allocations(traced, runs, home)
    units = build_units(traced, runs, (names or _names)(runs), home, shared)
    return PartitionedGraph(
        traced=traced,
        units=tuple(units[:-1]),
        output_assembly=units[-1],
        allocations=tuple(node for node in traced.gm.graph.nodes if node in shared),
        token_count=token_count(traced),
        last_use=_last_use(units),
        notes=traced.notes,
    )


def _last_use(units: Sequence[Unit]) -> dict[fx.Node, int]:
    return {node: index for index, unit in enumerate(units) for node in unit.inputs}


def _runs(traced: TracedGraph) -> Iterator[Run]:
    for is_eager, nodes in itertools.groupby(traced.compute_nodes(), key=lambda node: node in traced.eager):
        yield ("region" if is_eager else "piece"), tuple(nodes)


def _names(runs: Sequence[Run]) -> list[str]:
    counts: Counter[str] = Counter()
    names = []
    for kind, _ in runs:
        names.append("output assembly" if kind == "output assembly" else f"{kind}_{counts[kind]}")
        counts[kind] += 1
    return names
