"""Find out whether a size of 1 changes what the graph does to memory.

    y = x.t().contiguous()        x [4, u0]: a copy        x [4, 1]: x itself

A tensor with a dim of one element is contiguous in more ways than one, so an op that copies may return a view instead.
Dynamo traces a graph of its own for such a size, unless the size was marked as unbacked: then one graph serves all. So
the effects are inferred once more with each unbacked size, and with all of them, as 1. Where they differ, a call with
such sizes runs the traced graph (`runtime/traced_call.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import sympy

from ..compat.dispatch import pytree
from ..compat.symbols import is_unbacked
from ..errors import Dsv4Error
from ..graph.traced import Effects, FakeInputs, SizeValues, TensorMeta, TracedGraph
from .infer_effects import NeedsSymbolsError, run_on_fakes


def try_ones(traced: TracedGraph, *, resized: Callable[[SizeValues], FakeInputs]) -> TracedGraph:
    """Fill in `ones`."""
    unbacked = [symbol for symbol in traced.symbols if is_unbacked(symbol)]
    tried = {frozenset([symbol]) for symbol in unbacked} | {frozenset(unbacked)} - {frozenset()}
    return replace(traced, ones=frozenset(ones for ones in tried if _is_the_same(traced, ones, resized)))


def _is_the_same(
    traced: TracedGraph, ones: frozenset[sympy.Symbol], resized: Callable[[SizeValues], FakeInputs]
) -> bool:
    sizes = {**traced.traced_sizes, **dict.fromkeys(ones, sympy.Integer(1))}
    try:
        other = run_on_fakes(replace(traced, traced_sizes=sizes), resized(sizes))
    except (Dsv4Error, NeedsSymbolsError):
        return False  # a size that data decides, or an op that does not take a 1
    return all(_memory(effects) == _memory(other.effects[node]) for node, effects in traced.effects.items())


def _memory(effects: Effects) -> Hashable:
    """What a node does to which storages."""
    metas = pytree.tree_leaves(effects.result)
    given = tuple(meta.storage for meta in metas if isinstance(meta, TensorMeta))
    return effects.reads, effects.writes, effects.makes, given, effects.is_view
