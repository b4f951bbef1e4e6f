"""Give every call of an op one spelling: its overload, with positional arguments.

    tup = torch.ops.ns.tup(q=o)            ->   tup = torch.ops.ns.tup.default(o)
    h = x.unsqueeze_(0); y = x + 1         ->   h = x.unsqueeze(0); y = h + 1

A role is looked up by overload, and identical pieces are recognised by comparing nodes, so packets, `custom_op`
objects and keyword calls must not look different. Methods that only change the metadata of a tensor in place become
the view they amount to, for all later users: afterwards a node's shape never changes behind its back.
"""

from __future__ import annotations

import torch
from torch import fx

from ..compat.dispatch import OpOverload, OpOverloadPacket, op_name, pytree, resolve_overload
from ..compat.functorch import is_transform_node
from ..errors import UnsupportedInputError, UnsupportedTransformError
from ..graph.source_lines import where
from ..graph.traced import TracedGraph, Value

_METADATA_METHODS = {
    "t_": "t",
    "transpose_": "transpose",
    "swapaxes_": "swapaxes",
    "swapdims_": "swapdims",
    "squeeze_": "squeeze",
    "unsqueeze_": "unsqueeze",
    "as_strided_": "as_strided",
}


def resolve_targets(traced: TracedGraph) -> TracedGraph:
    """Rewrite the targets of all op calls, and the in-place metadata methods."""
    for node in list(traced.gm.graph.nodes):
        _refuse_transform(node)
        if node.op == "call_function" and _is_op(node.target):
            _call_overload(node)
        if (view := _view_target(node)) is not None:
            _make_view(node, view)
        if node.op == "call_method" and node.target == "detach_":
            _drop_detach(node)
    return traced


def _refuse_transform(node: fx.Node) -> None:
    if is_transform_node(node):
        raise UnsupportedTransformError(
            f"{node.name} belongs to a torch.func transform ({where(node)}), whose levels span several nodes and "
            "cannot be cut into pieces: call the transform from inside of a registered split op"
        )


def _drop_detach(node: fx.Node) -> None:
    """It returns its very argument, and there is no grad to cut off; torch refuses it of a view, which that may be."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _is_op(target: object) -> bool:
    return isinstance(getattr(target, "_opoverload", target), (OpOverload, OpOverloadPacket))


def _call_overload(node: fx.Node) -> None:
    args, kwargs = pytree.tree_map_only(fx.Node, _example, (node.args, node.kwargs))
    overload = resolve_overload(node.target, args, kwargs)
    positional = list(node.args)
    rest = dict(node.kwargs)
    for argument in overload._schema.arguments[len(positional) :]:
        if argument.kwarg_only or argument.name not in rest:
            break
        positional.append(rest.pop(argument.name))
    node.target, node.args, node.kwargs = overload, tuple(positional), rest


def _example(node: fx.Node) -> Value:
    return node.meta.get("example_value")


def _view_target(node: fx.Node) -> OpOverload | str | None:
    """For a call that changes the shape of its argument in place: the target that returns a view of that shape."""
    if node.op == "call_method":
        return _METADATA_METHODS.get(str(node.target))
    if not isinstance(node.target, OpOverload) or torch.Tag.inplace_view not in node.target.tags:
        return None
    packet = getattr(torch.ops.aten, node.target._opname.removesuffix("_"), None)
    if packet is None or node.target._overloadname not in packet.overloads():
        raise UnsupportedInputError(f"{op_name(node.target)} changes a tensor's memory in place ({where(node)})")
    view: OpOverload = getattr(packet, node.target._overloadname)
    return view


def _make_view(node: fx.Node, view: OpOverload | str) -> None:
    base = node.args[0]
    assert isinstance(base, fx.Node)
    # `y = h.add_(1)` and `h.contiguous()` may be the very tensor object `h`, whose shape changes with it
    value = _example(base)
    names = [other for other in node.graph.nodes if other is not node and _example(other) is value]
    base = next((other for other in names if other.op == "placeholder"), base)
    if base.op == "placeholder":
        raise UnsupportedInputError(
            f"{base.name}.{node.name}() changes the shape of the caller's own tensor in place ({where(node)}), which a "
            f"replay cannot repeat; use the view that {str(view).partition('.')[0]} would give instead"
        )
    node.target = view
    later = set(_after(node))
    for name in names:
        name.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)


def _after(node: fx.Node) -> list[fx.Node]:
    nodes = list(node.graph.nodes)
    return nodes[nodes.index(node) + 1 :]
