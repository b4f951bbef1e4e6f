"""Take checks of sizes out of the graph: a call is asked once, before it runs, and a capture never again.

    ok = s77 < 9; _assert_scalar(ok)            ->    size_checks(s77):  ok = s77 < 9; _assert_scalar(ok)
    n = x.item(); ok = n < 9; _assert(ok)             stays: it depends on data

A check of sizes gives one answer for all calls of a bucket, so it need not split a piece, nor cost a call anything.
Most are guarded by Dynamo anyway; those of unbacked sizes (`mark_unbacked`) need not be. A call that fails one runs the
traced graph, which raises where the program does, after whatever comes before.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..compat.dynamo import module_of
from ..graph.op_properties import is_number_check
from ..graph.traced import TracedGraph


def lift_size_checks(traced: TracedGraph) -> TracedGraph:
    """Fill in `size_checks`, and remove from the graph what is in it."""
    sizes = dict.fromkeys(traced.symbols.values())  # nodes that sizes of the inputs decide, in order
    checks: list[fx.Node] = []
    for node in traced.gm.graph.nodes:
        if node.op != "call_function" or not all(arg in sizes for arg in node.all_input_nodes):
            continue
        if is_number_check(node):
            checks.append(node)
        elif node.all_input_nodes:
            sizes[node] = None
    if not checks:
        return traced
    size_checks = _module(traced, [*sizes, *checks])
    for node in checks:
        traced.gm.graph.erase_node(node)
    return replace(traced, size_checks=size_checks)


def _module(traced: TracedGraph, nodes: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in traced.symbols.values()}
    for node in nodes:
        if node not in env:
            env[node] = graph.node_copy(node, lambda arg: env[arg])
    graph.output(())
    return module_of(traced.gm, graph, "size_checks")
