"""Make one node of everything between entering and leaving the levels of a `torch.func` transform.

    _vmap_increment_nesting(n)
    b = _add_batch_dim(x, 0, 1)
    s = sin(b)                            ->    y = vmap(x, n)
    y = _remove_batch_dim(s, 1, n, 0)
    _vmap_decrement_nesting()

What is wrapped at a level may not cross a boundary, and a level may not be entered in one piece and left in another.
So it is with a level of forward-mode derivatives (`torch.autograd.forward_ad.dual_level`), which `jvp` enters too.
The node's effects are those of all that it runs, below the transform; engines record the ops that it comes down to.

Refused, by name: transforms that differentiate (this backend serves inference), and values that leave their level.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from ..compat.dispatch import pytree
from ..compat.dynamo import module_of
from ..compat.functorch import entered_level, is_wrapped, leaves_level, load_rules, loads_rules
from ..errors import UnsupportedTransformError
from ..graph.fused_call import FusedCall
from ..graph.source_lines import where
from ..graph.traced import TracedGraph

_REFUSED = {"grad": "grad, vjp, jacrev or hessian", "func": "functionalize"}
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def fuse_transforms(traced: TracedGraph) -> TracedGraph:
    """Replace every outermost span of levels.

    Raises:
        UnsupportedTransformError: the transform differentiates, or lets a value out of its level.
    """
    for node in [node for node in traced.gm.graph.nodes if loads_rules(node)]:
        load_rules()
        traced.gm.graph.erase_node(node)
    for span in list(_spans(traced.gm.graph)):
        _fuse(traced, span)
    return traced


def _spans(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes from entering a level to leaving it, levels inside of others included."""
    span: list[fx.Node] = []
    open_levels = 0
    for node in graph.nodes:
        level = entered_level(node)
        if level in _REFUSED:
            raise UnsupportedTransformError(
                f"torch.func.{_REFUSED[level]} is called ({where(_with_line(node))}), and dsv4_piecewise is for "
                "inference: call it from inside of a registered split op, or outside of what is compiled"
            )
        open_levels += level is not None
        if open_levels:
            span.append(node)
        if leaves_level(node) and open_levels:
            open_levels -= 1
            if not open_levels:
                yield span
                span = []


def _with_line(node: fx.Node) -> fx.Node:
    """The node, or the first one after it whose line is known: Dynamo notes none where a level is entered."""
    later = node
    while later.stack_trace is None and later.op != "output":
        later = later.next
    return later


def _fuse(traced: TracedGraph, span: Sequence[fx.Node]) -> None:
    kind = entered_level(span[0])
    assert kind is not None, "a span begins where a level is entered"
    inside = dict.fromkeys(_without_numbers(span))
    for node in list(inside):
        inside |= dict.fromkeys(_items(node))
    results = [node for node in inside if any(user not in inside for user in node.users)]
    _refuse_wrapped(results)
    inputs = list(dict.fromkeys(arg for node in inside for arg in node.all_input_nodes if arg not in inside))
    gm = module_of(traced.gm, _graph_of(list(inside), inputs, results), kind)
    graph = traced.gm.graph
    with graph.inserting_after(span[-1]):
        fused = graph.call_function(FusedCall(kind, gm), tuple(inputs))
    lines = [node.stack_trace for node in span if node.stack_trace]
    fused.meta["stack_trace"] = lines[-1] if lines else None
    values = [node.meta.get("example_value") for node in results]
    fused.meta["example_value"] = values[0] if len(results) == 1 else tuple(values) or None
    for result, replacement in zip(results, _replacements(fused, results), strict=True):
        result.replace_all_uses_with(replacement, delete_user_cb=lambda user: user not in inside)
    for node in reversed(inside):
        graph.erase_node(node)


def _without_numbers(span: Sequence[fx.Node]) -> list[fx.Node]:
    """The span without arithmetic on sizes, which is put before it: it belongs to no level, and others may need it."""
    known = set(span)
    kept = []
    for node in span:
        is_number = isinstance(node.meta.get("example_value"), _NUMBERS)
        if is_number and not known.intersection(node.all_input_nodes) and not _takes_tensor(node):
            span[0].prepend(node)
            known.discard(node)
        else:
            kept.append(node)
    return kept


def _takes_tensor(node: fx.Node) -> bool:
    return any(not isinstance(arg.meta.get("example_value"), _NUMBERS) for arg in node.all_input_nodes)


def _items(node: fx.Node) -> list[fx.Node]:
    """What is taken out of a container, at any depth: a container does not leave a node."""
    if not isinstance(node.meta.get("example_value"), (tuple, list)):
        return []
    taken = [user for user in sorted(node.users) if user.target is operator.getitem]
    return [item for user in taken for item in (user, *_items(user))]


def _refuse_wrapped(results: Sequence[fx.Node]) -> None:
    for node in results:
        if any(map(is_wrapped, pytree.tree_leaves(node.meta.get("example_value")))):
            raise UnsupportedTransformError(
                f"{node.name} leaves the torch.func transform that it belongs to ({where(node)}): return it from the "
                "function that is transformed"
            )


def _graph_of(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in inputs}
    for node in sorted(nodes):
        env[node] = graph.node_copy(node, lambda arg: env[arg])
    given = tuple(env[node] for node in results)
    graph.output(given[0] if len(results) == 1 else given or None)
    return graph


def _replacements(fused: fx.Node, results: Sequence[fx.Node]) -> list[fx.Node]:
    if len(results) == 1:
        return [fused]
    items = []
    last = fused
    for index, result in enumerate(results):
        with fused.graph.inserting_after(last):
            last = fused.graph.call_function(operator.getitem, (fused, index))
        last.meta.update(result.meta)
        items.append(last)
    return items
