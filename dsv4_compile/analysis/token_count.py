"""Which size of a graph counts its tokens."""

from __future__ import annotations

import sympy
import torch
from torch import fx

from ..compat.dispatch import HigherOrderOperator, OpOverload, op_name, pytree
from ..compat.symbols import expr_of
from ..graph.fused_call import FusedCall
from ..graph.joined_call import op_of
from ..graph.op_properties import bind_arguments
from ..graph.traced import TensorMeta, TracedGraph
from ..ops.registry import find_op
from .eager_reasons import why_split


def token_count(traced: TracedGraph) -> sympy.Expr | None:
    """Dim 0 of the first tensor argument (or the registered one) of the first split op, as an expression.

    Without a split op: dim 0 of the first tensor input that is not static.
    """
    for node in traced.compute_nodes():
        if why_split(traced, node) and not isinstance(node.target, (HigherOrderOperator, FusedCall)):
            tokens = _tokens_of_call(traced, node)
            if tokens is None or tokens.free_symbols <= traced.symbols.keys():
                return tokens  # a split op on rows that data selects is no measure of the batch
    for graph_input in traced.inputs:
        if isinstance(graph_input.value, torch.Tensor) and not graph_input.static and graph_input.value.dim():
            return expr_of(graph_input.value.shape[0])
    return None


def _tokens_of_call(traced: TracedGraph, node: fx.Node) -> sympy.Expr | None:
    wanted: list[object] = [*node.args, *node.kwargs.values()]
    op = op_of(node.target)
    if isinstance(op, OpOverload):
        registered = find_op(traced.ops, op_name(op))
        if registered is not None and registered.tokens is not None:
            wanted = [bind_arguments(op, node.args, node.kwargs).get(registered.tokens)]
    for arg in wanted:
        for leaf in pytree.tree_leaves(arg):
            meta = traced.effects[leaf].result if isinstance(leaf, fx.Node) else None
            if isinstance(meta, TensorMeta) and meta.shape:
                return expr_of(meta.shape[0])
    return None
