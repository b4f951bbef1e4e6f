"""Let what goes by places in a storage count from its base and not from the start of the storage.

    v = h.as_strided((2, 2), (4, 1), 1)     ->     own = h.storage_offset(); v = h.as_strided((2, 2), (4, 1), own + 1)

`as_strided` and its siblings take an offset into the storage. In a captured call the base may be a slot in the middle
of the workspace, and there the offset is not what it was in the trace. With a base that is an input of the graph, or a
constant, the offset stays as it is written: what is eager sees the caller's own tensor (`inputs_shown_around`), whose
storage the caller meant.

The siblings that make a tensor of their own run eagerly. A recorded kernel holds the offset as a number, while what it
reads may yet be moved to another place (`copy_elision`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, fx
from torch.fx.node import Argument

from ..analysis.sizes import bytes_needed
from ..compat.symbols import build_expr, expr_of
from ..errors import UnsupportedInputError
from ..graph.op_properties import strided_name
from ..graph.source_lines import where
from ..graph.traced import Effects, Provenance, TensorMeta, TracedGraph

# The arguments of each in order, as torch names them.
_VIEW = ("input", "size", "stride", "storage_offset")
_ARGUMENTS = {
    "as_strided": _VIEW,
    "as_strided_copy": _VIEW,
    "as_strided_scatter": ("input", "src", "size", "stride", "storage_offset"),
}
BY_PLACE = "reads memory by its place in a storage, which a captured graph may move"


def relate_offsets(traced: TracedGraph) -> TracedGraph:
    """Rewrite the offset of every strided view of a computed value, and keep eager what copies through one."""
    effects = dict(traced.effects)
    for node in list(traced.gm.graph.nodes):
        names = _ARGUMENTS.get(strided_name(node))
        if names is None:
            continue
        if not effects[node].is_view:
            effects[node] = replace(effects[node], uncapturable=effects[node].uncapturable or BY_PLACE)
        base = _argument(node, names, "input")
        if not isinstance(base, fx.Node):
            continue
        meta = effects[base].result
        if isinstance(meta, TensorMeta) and traced.storages[meta.storage] is Provenance.ACTIVATION:
            _relate(traced, node, names, _with_known_offset(traced, node, base), effects)
    return replace(traced, effects=effects)


def _with_known_offset(traced: TracedGraph, node: fx.Node, base: fx.Node) -> fx.Node:
    """The base, or where data chooses its offset the next thing it is a view of: both are in one storage."""
    origin, storage = base, traced.storage_of(base)
    while not _knows_offset(traced, origin):
        views = [arg for arg in origin.all_input_nodes if traced.storage_of(arg) == storage]
        if not views:
            raise UnsupportedInputError(
                f"{node.name} counts from the start of a storage in which data chooses the place of {base.name} "
                f"({where(node)}): use torch.narrow, or index with a tensor"
            )
        origin = views[0]
    return origin


def _knows_offset(traced: TracedGraph, node: fx.Node) -> bool:
    meta = traced.effects[node].result
    return isinstance(meta, TensorMeta) and traced.knows(meta.offset)


def _argument(node: fx.Node, names: Sequence[str], name: str) -> Argument:
    """An argument of a call, however it is given; None where it is left out."""
    index = names.index(name)
    if index < len(node.args):
        return node.args[index]
    return node.kwargs.get("self" if name == "input" and "self" in node.kwargs else name)


def _relate(
    traced: TracedGraph, node: fx.Node, names: Sequence[str], origin: fx.Node, effects: dict[fx.Node, Effects]
) -> None:
    """Let a call count from `origin`, its base or what that is a view of, which begins at an offset of a storage."""
    meta = effects[origin].result
    assert isinstance(meta, TensorMeta), "what a tensor is a view of is a tensor"
    graph, known = traced.gm.graph, set(traced.gm.graph.nodes)
    offset = _argument(node, names, "storage_offset")
    with graph.inserting_before(node):
        start = build_expr(expr_of(meta.offset), traced.symbols, graph)
        if "src" in names and origin is not _argument(node, names, "input"):
            raise UnsupportedInputError(
                f"{node.name} scatters into a view that data chooses ({where(node)}): write to it in place instead"
            )
        if "src" in names:
            _scatter_from(node, names, start, offset)
        elif offset is not None:
            distance = graph.call_function(operator.sub, (offset, start))
            own = graph.call_method("storage_offset", (origin,))
            _set_offset(node, names, graph.call_function(operator.add, (own, distance)))
    effects.update({made: Effects() for made in graph.nodes if made not in known})


def _set_offset(node: fx.Node, names: Sequence[str], offset: fx.Node) -> None:
    index = names.index("storage_offset")
    if index < len(node.args):
        node.args = (*node.args[:index], offset, *node.args[index + 1 :])
    else:
        node.kwargs = {**node.kwargs, "storage_offset": offset}


def _scatter_from(node: fx.Node, names: Sequence[str], start: Argument, offset: Argument) -> None:
    base, src, size, stride = (_argument(node, names, name) for name in names[:4])
    node.op, node.target = "call_function", as_strided_scatter
    node.args, node.kwargs = (base, src, size, stride, offset, start), {}


def as_strided_scatter(
    base: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None, start: int
) -> Tensor:
    """What torch's gives for a base that begins at `start` of a storage of its own, wherever it lies now.

    Torch's clones the whole storage, which here may be the arena.
    """
    first = start if offset is None else offset
    extents = (start + bytes_needed(base.size(), base.stride(), 1), first + bytes_needed(size, stride, 1))
    whole = base.as_strided((max(extents),), (1,), int(base.storage_offset()) - start)
    scattered = whole.clone().as_strided(base.size(), base.stride(), start)
    scattered.as_strided(size, stride, first).copy_(src)
    return scattered
