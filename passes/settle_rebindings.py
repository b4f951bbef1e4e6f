"""Settle what gives a tensor other memory in place: `t.set_(y)`, and `p.data = y`, as Dynamo writes `p.data -= d`.

    d = p.data; d -= y; p.set_(d)       ->   d = p.data; d -= y        p was there already
    p.set_(p * 2)                       ->   the graph runs as it was traced, uncaptured

No replay repeats the second, and a view that was taken before it may not be taken again after it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ..graph.source_lines import where
from ..graph.traced import TensorMeta, TracedGraph


def settle_rebindings(traced: TracedGraph) -> TracedGraph:
    """Drop those that change nothing, and fill in `run_as_traced` where one does."""
    for node in list(traced.gm.graph.nodes):
        if not is_rebinding(node):
            continue
        if _changes_nothing(traced, node):
            traced = _without(traced, node)
        elif traced.run_as_traced is None:
            reason = f"{node.args[0]} gets other memory in place ({where(node)}), which no replay repeats"
            traced = replace(traced, run_as_traced=reason)
    return traced


def is_rebinding(node: fx.Node) -> bool:
    """`t.set_(y)` or `t.data = y`."""
    # `.data = ` is the first of these up to torch 2.13, and the second from 2.14 on
    named = getattr(node.target, "_qualified_op_name", None) or getattr(node.target, "_name", "")
    is_copy = str(named).startswith("aten::shallow_copy_data_")
    return node.target is torch.Tensor.set_ or is_copy or (node.op == "call_method" and node.target == "set_")


def _changes_nothing(traced: TracedGraph, node: fx.Node) -> bool:
    """The tensor has that memory already, in the same layout."""
    base, *rest = node.args
    if len(rest) != 1 or node.kwargs or not (isinstance(base, fx.Node) and isinstance(rest[0], fx.Node)):
        return False
    before, after = (traced.effects[value].result for value in (base, rest[0]))
    return isinstance(before, TensorMeta) and before == after


def _without(traced: TracedGraph, node: fx.Node) -> TracedGraph:
    """The graph without a rebinding, and without what Dynamo lets follow it to hide it from autograd."""
    gone = [*(user for user in node.users if "_lower_version_count" in str(user.target)), node]
    for dropped in gone:
        dropped.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        traced.gm.graph.erase_node(dropped)
    return replace(traced, effects={key: value for key, value in traced.effects.items() if key not in gone})
