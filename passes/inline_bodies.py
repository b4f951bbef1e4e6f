"""Put the bodies of plain wrappers in place of their calls, so that what is in them is split, moved and captured.

    t = invoke_subgraph(body, "body_0", h)            a = h @ w
    y = t[0]                                   ->     attn(a, out!)
                                                      y = out * 2

`invoke_subgraph` (nested_compile_region), `tag_activation_checkpoint` and the like do nothing but call their body, in
inference. A body that is called twice is put in twice. What decides on the host which body it runs, and how often, is
left as it is (`cond`, `while_loop`): one eager node.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.node import Argument

from ..compat.dispatch import pytree
from ..compat.symbols import expr_of
from ..graph.traced import TracedGraph, Value
from ..graph.wrapper_calls import calls_body, operands_of


def inline_bodies(traced: TracedGraph) -> TracedGraph:
    """Inline every call of a wrapper, at any depth."""
    pending = list(reversed(traced.gm.graph.nodes))
    while pending:
        node = pending.pop()
        body = _body_of(traced.gm, node)
        if body is not None:
            pending += reversed(_inline(node, body, operands_of(node, node.args)))
    return traced


def _body_of(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The body that a node runs, if it can take its place."""
    if not calls_body(node):
        return None
    body = _attribute(gm, node.args[0])
    if not isinstance(body, fx.GraphModule) or any(user.target is not operator.getitem for user in node.users):
        return None
    placeholders, operands = body.graph.find_nodes(op="placeholder"), operands_of(node, node.args)
    if len(placeholders) != len(operands) or not isinstance(body.graph.output_node().args[0], (tuple, list)):
        return None
    same = all(_layout(p) == _layout(operand) for p, operand in zip(placeholders, operands, strict=True))
    return body if same else None  # sizes in the body would be those of another call of it


def _attribute(gm: fx.GraphModule, node: object) -> object:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    return operator.attrgetter(str(node.target))(gm)


def _layout(value: object) -> object:
    """What of a value the values computed from it depend on, its data aside."""
    value = value.meta.get("example_value") if isinstance(value, fx.Node) else value
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride())
        return value.dtype, value.device, value.dim(), tuple(expr_of(size) for size in sizes)
    return expr_of(value) if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool) else value


def _inline(node: fx.Node, body: fx.GraphModule, operands: Sequence[Argument]) -> list[fx.Node]:
    """Copy the body in front of its call and let users take its results; returns the copies."""
    graph, path = node.graph, node.args[0]
    assert isinstance(path, fx.Node), "a body is an attribute"
    env: dict[fx.Node, Argument] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    copies = []
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op not in ("placeholder", "output"):
                copies.append(graph.node_copy(inner, lambda arg: env[arg]))
                env[inner] = copies[-1]
                if inner.op == "get_attr":
                    copies[-1].target = f"{path.target}.{inner.target}"
    results: Value = pytree.tree_map_only(fx.Node, lambda arg: env[arg], body.graph.output_node().args[0])
    for item in list(node.users):
        item.replace_all_uses_with(results[item.args[1]])
        graph.erase_node(item)
    graph.erase_node(node)
    if not path.users:
        graph.erase_node(path)
    return copies
