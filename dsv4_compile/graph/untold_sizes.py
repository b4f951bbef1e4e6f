"""Let a graph take each size that it depends on: Dynamo leaves out one that it has been told to be another.

    mark_unbacked(x, 0, shape_id="n"); mark_unbacked(y, 0, shape_id="n")

    def forward(u0, x, y):           def forward(u0, x, y, size_of_y_0):
        n = y.size(0)          ->        n = y.size(0)
        check(n == u0)                   check(n == u0)

The size of y is a symbol of its own until the check holds, and no input carries it. Where a graph has such a size, it
is given as one more input, measured in every call: so it is part of the bucket, and a call that the check would refuse
is no call that was captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import Tensor, fx

from ..compat.dynamo import InnerTensor, keep_break_reason, module_of, note_inner_tensor, source_of
from ..compat.symbols import expr_of
from .plain_graph import PlainGraph, PlainInput, PlainResult
from .traced import Value
from .tracing import readable_name


def with_all_sizes(gm: fx.GraphModule, example_inputs: Sequence[Value]) -> PlainGraph:
    """The graph itself, or one that takes the sizes of its inputs which none of them tells.

    Args:
        gm: Dynamo's graph, without wrapper subclasses; it is not changed.
        example_inputs: one real tensor or SymInt per placeholder.
    """
    untold = _untold(gm)
    if not untold:
        return PlainGraph(gm=gm, example_inputs=example_inputs)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node in placeholders:
        copies[node] = graph.node_copy(node)
    for plain, size in untold:
        node = placeholders[plain.position]
        assert plain.measure is not None, "it is a size"
        _, dim = plain.measure
        taken = graph.placeholder(f"size_of_{node.name}_{dim}")
        taken.meta["example_value"] = size
        note_inner_tensor(taken, InnerTensor(None, f"{readable_name(source_of(node))}.size()[{dim}]"))
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, lambda arg: copies[arg])
    output = gm.graph.output_node()
    graph.output(fx.node.map_arg(output.args[0], lambda arg: copies[arg]))
    results = output.args[0]
    assert isinstance(results, (tuple, list)), "Dynamo's graphs return several values"
    rewritten = module_of(gm, graph)
    keep_break_reason(rewritten, gm)
    inputs = (*map(PlainInput, range(len(placeholders))), *(plain for plain, _ in untold))
    return PlainGraph(
        gm=rewritten,
        example_inputs=[*example_inputs, *(size for _, size in untold)],
        inputs=inputs,
        results=tuple(map(PlainResult, range(len(results)))),
    )


def _untold(gm: fx.GraphModule) -> list[tuple[PlainInput, torch.SymInt]]:
    """Where to measure the size symbols that no input is, each once, and what they are in the trace."""
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    told: set[sympy.Expr] = {expr_of(value) for value in values if isinstance(value, torch.SymInt)}
    untold: list[tuple[PlainInput, torch.SymInt]] = []
    for position, value in enumerate(values):
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, torch.SymInt) and expr_of(size).is_Symbol and expr_of(size) not in told:
                told.add(expr_of(size))
                untold.append((PlainInput(position, (), ("size", dim)), size))
    return untold
