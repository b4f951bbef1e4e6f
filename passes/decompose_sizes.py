"""Replace sizes read off tensors by arithmetic on the size symbols.

    size = x.size(); ...; v = o.view(size)       ->    ...; v = o.view((s77, 4))
    n = h.numel()                                ->    n = 4 * s77

A `torch.Size` is neither a tensor nor an int and may not cross a boundary, and a size read off an activation would
make that tensor cross for its shape alone. Symbols are inputs of the graph, so their arithmetic is free everywhere.
Sizes with a symbol that is no graph input (they depend on data) are left as they are.
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.node import Argument

from ..compat.symbols import build_expr, expr_of
from ..graph.traced import TracedGraph, Value

Args = TypeVar("Args", bound=Argument)

# What reads sizes and does nothing else; any other node with a number as its value is left to the effects pass.
_SIZE_METHODS = frozenset(["size", "stride", "numel", "nelement", "dim", "ndimension", "storage_offset", "__len__"])
_SIZE_FUNCTIONS = frozenset([operator.getitem, len, torch.numel])


def decompose_sizes(traced: TracedGraph) -> TracedGraph:
    """Rewrite every node whose value is a size, or a tuple of sizes, read off a tensor or another tuple."""
    for node in list(traced.gm.graph.nodes):
        value = node.meta.get("example_value")
        if _reads_sizes(node) and _is_sizes(value) and _is_known(value, traced):
            _replace(node, value, traced)
    return traced


def _reads_sizes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SIZE_METHODS
    return node.op == "call_function" and node.target in _SIZE_FUNCTIONS


def _is_sizes(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_size(item) for item in value)
    return _is_size(value)


def _is_size(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _is_known(value: Value, traced: TracedGraph) -> bool:
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    return all(map(traced.knows, sizes))


def _replace(node: fx.Node, value: Value, traced: TracedGraph) -> None:
    graph = traced.gm.graph
    with graph.inserting_before(node):
        if isinstance(value, (tuple, list)):
            built = tuple(build_expr(expr_of(size), traced.symbols, graph) for size in value)
            result: Any = built
        else:
            result = build_expr(expr_of(value), traced.symbols, graph)
    for user in list(node.users):
        if user.op == "output" and isinstance(value, torch.Size):
            with graph.inserting_before(node):
                result = graph.call_function(torch.Size, (list(result),))
        user.args, user.kwargs = _substitute((user.args, user.kwargs), node, result)
    graph.erase_node(node)


def _substitute(args: Args, node: fx.Node, result: Argument) -> Args:
    return fx.map_arg(args, lambda arg: result if arg is node else arg)
