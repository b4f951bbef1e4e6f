"""Let the offset of a strided view count from its base and not from the start of the storage.

    v = h.as_strided((2, 2), (4, 1), 1)     ->     own = h.storage_offset(); v = h.as_strided((2, 2), (4, 1), own + 1)

`as_strided` takes an offset into the storage. In a captured call the base may be a slot in the middle of the workspace,
and the offset of an input is one that Dynamo does not guard: both differ from what they were in the trace.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from ..compat.symbols import build_expr, expr_of
from ..graph.op_properties import strided_name
from ..graph.traced import Effects, TensorMeta, TracedGraph

# Where each takes its offset, by position; `storage_offset` by name.
_POSITIONS = {"as_strided": 3, "as_strided_copy": 3, "as_strided_scatter": 4}


def relate_offsets(traced: TracedGraph) -> TracedGraph:
    """Rewrite the offset of every strided view that has one."""
    effects = dict(traced.effects)
    for node in list(traced.gm.graph.nodes):
        position = _POSITIONS.get(strided_name(node))
        if position is None:
            continue
        if len(node.args) > position and node.args[position] is not None:
            related = _related(traced, node, node.args[position], effects)
            node.args = (*node.args[:position], related, *node.args[position + 1 :])
        elif node.kwargs.get("storage_offset") is not None:
            related = _related(traced, node, node.kwargs["storage_offset"], effects)
            node.kwargs = {**node.kwargs, "storage_offset": related}
    return replace(traced, effects=effects)


def _related(traced: TracedGraph, node: fx.Node, offset: Any, effects: dict[fx.Node, Effects]) -> fx.Node:
    """The base's own offset, read in the call, plus how far after it the view began in the trace."""
    base, graph = node.args[0], traced.gm.graph
    assert isinstance(base, fx.Node), "a strided view is taken of a tensor"
    meta = effects[base].result
    assert isinstance(meta, TensorMeta), "a strided view is taken of a tensor"
    known = set(graph.nodes)
    with graph.inserting_before(node):
        in_trace = build_expr(expr_of(meta.offset), traced.symbols, graph)
        distance = graph.call_function(operator.sub, (offset, in_trace))
        own = graph.call_method("storage_offset", (base,))
        related = graph.call_function(operator.add, (own, distance))
    effects.update({made: Effects() for made in graph.nodes if made not in known})
    return related
