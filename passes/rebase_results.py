"""Let users of an op's result that is really one of its arguments use the argument, or a view of it.

    y = h.add_(1); z = y * 2            ->   y = h.add_(1); z = h * 2
    w = checkpoint(body, h)  # a view   ->   w = checkpoint(body, h); s = as_strided(h, ...); users take s

Views do not cross a boundary, their base does, and the op itself must not be run again to get at its result. The
order stays safe without the data edge: `h` is written by one and read by the other.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from ..compat.dispatch import negated_view
from ..compat.symbols import build_expr, expr_of
from ..graph.traced import Effects, TensorMeta, TracedGraph

_LAZY = (torch.conj, negated_view)  # what sets, or takes back, the bits of TensorMeta


def rebase_results(traced: TracedGraph) -> TracedGraph:
    """Redirect the users of every result that shares memory with an argument of the op, or with another result."""
    effects = dict(traced.effects)
    for node in traced.compute_nodes():
        owners = list(node.all_input_nodes)
        # the largest first: the others can be viewed from it
        for value in sorted([node, *traced.items(node)], key=lambda value: -_extent(traced, effects[value].result)):
            if isinstance(effects[value].result, TensorMeta) and not _redirect(traced, value, owners, effects):
                owners.append(value)
    return replace(traced, effects=effects)


def _redirect(traced: TracedGraph, value: fx.Node, owners: Sequence[fx.Node], effects: dict[fx.Node, Effects]) -> bool:
    """Let users of a value use one of the owners instead, if one shares its memory."""
    result = effects[value].result
    assert isinstance(result, TensorMeta), "only tensors share memory"
    sharing = [owner for owner in owners if _storage(effects[owner]) == result.storage]
    alike = [owner for owner in sharing if effects[owner].result == result]
    if alike:
        same = next((owner for owner in alike if _is_object(effects, value, owner)), None)
        if value.users:
            value.replace_all_uses_with(same or _alias_of(traced, alike[0], value, effects))
        return True
    base = next((owner for owner in sharing if _shows(traced, owner, value)), None)
    if base is None:
        return False
    if value.users:
        view = view_of(traced, base, value, result, effects)
        value.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)
    return True


def _is_object(effects: dict[fx.Node, Effects], value: fx.Node, owner: fx.Node) -> bool:
    """Whether a result is the very tensor object that another node gave, and not a second one with its memory."""
    return (effects[value].same_as or value) is (effects[owner].same_as or owner)


def _alias_of(traced: TracedGraph, base: fx.Node, value: fx.Node, effects: dict[fx.Node, Effects]) -> fx.Node:
    """A tensor object of its own, as the caller gets in eager."""
    with traced.gm.graph.inserting_after(max(value, base)):
        alias = traced.gm.graph.call_function(torch.ops.aten.alias.default, (base,))
    effects[alias] = Effects(result=effects[value].result)
    alias.meta.update(value.meta)
    return alias


def view_of(
    traced: TracedGraph, base: fx.Node, value: fx.Node, result: TensorMeta, effects: dict[fx.Node, Effects]
) -> fx.Node:
    """`value` as a strided view of `base`; offsets count from the base's own, which differs from call to call."""
    graph, known = traced.gm.graph, set(traced.gm.graph.nodes)
    start = effects[base].result
    assert isinstance(start, TensorMeta), "a base is a tensor"
    with graph.inserting_after(max(value, base)):  # the base may be a later one of the op's results
        view = graph.call_function(torch.as_strided)
    with graph.inserting_before(view):
        shape, stride = (
            [build_expr(expr_of(size), traced.symbols, graph) for size in part]
            for part in (result.shape, result.stride)
        )
        offset = build_expr(expr_of(result.offset) - expr_of(start.offset), traced.symbols, graph)
        if offset != 0:
            own = graph.call_method("storage_offset", (base,))
            offset = graph.call_function(operator.add, (own, offset))
        view.args = (base, shape, stride) if offset == 0 else (base, shape, stride, offset)
    view = _with_bits(graph, view, start, result)
    tensors = (torch.as_strided, *_LAZY)
    made = [node for node in graph.nodes if node not in known]
    effects.update({node: Effects(result=result if node.target in tensors else None) for node in made})
    view.meta.update(value.meta)
    return view


def _with_bits(graph: fx.Graph, view: fx.Node, start: TensorMeta, result: TensorMeta) -> fx.Node:
    """A strided view has the lazy bits of its base; give it those of the result."""
    for target, is_other in zip(_LAZY, (start.conj != result.conj, start.neg != result.neg), strict=True):
        if is_other:
            with graph.inserting_after(view):
                view = graph.call_function(target, (view,))
    return view


def can_be_computed(traced: TracedGraph, result: TensorMeta, start: object) -> bool:
    """Whether sizes of the graph's inputs tell where a result lies in its base; a row that data selects may be any."""
    assert isinstance(start, TensorMeta), "a base is a tensor"
    sizes = (*result.shape, *result.stride, result.offset, start.offset)
    return all(map(traced.knows, sizes))


def spans(traced: TracedGraph, one: object, other: object) -> bool:
    """Whether a layout reaches over all of another in the same memory, for the sizes of the trace."""
    starts, ends = zip(*[_range(traced, meta) for meta in (one, other)], strict=True)
    return bool(starts[0] <= starts[1] and ends[0] >= ends[1])


def _range(traced: TracedGraph, meta: object) -> tuple[int, int]:
    assert isinstance(meta, TensorMeta), "only a tensor has a layout"
    start = traced.size_in_trace(meta.offset)
    return start, start + _extent(traced, meta)


def _extent(traced: TracedGraph, meta: object) -> int:
    """Elements that a result spans, for the sizes of the trace; none for what is no tensor."""
    if not isinstance(meta, TensorMeta):
        return -1
    if not all(map(traced.knows, (*meta.shape, *meta.stride))):
        return 0
    shape, stride = map(traced.size_in_trace, meta.shape), map(traced.size_in_trace, meta.stride)
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _storage(effects: Effects) -> int | None:
    return effects.result.storage if isinstance(effects.result, TensorMeta) else None


def _shows(traced: TracedGraph, owner: fx.Node, value: fx.Node) -> bool:
    """Whether a result can be viewed from an argument, or from another result of the op, of which a slot holds a part.

    An argument is a view of something that holds all of its storage.
    """
    start, result = traced.effects[owner].result, traced.effects[value].result
    assert isinstance(start, TensorMeta), "an owner is a tensor"
    assert isinstance(result, TensorMeta), "only tensors share memory"
    if start.dtype != result.dtype or not can_be_computed(traced, result, start):
        return False
    return traced.producer(owner) is not traced.producer(value) or spans(traced, start, result)
