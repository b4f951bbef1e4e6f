"""Let users of an op's result that is really one of its arguments use the argument.

    y = h.add_(1); z = y * 2            ->   y = h.add_(1); z = h * 2
    w = checkpoint(body, h)  # a view   ->   w = checkpoint(body, h); s = as_strided(h, ...); users take s

Views do not cross a boundary, their base does, and the op itself must not be run again to get at its result. The
order stays safe without the data edge: `h` is written by one and read by the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ..compat import build_expr, expr_of
from ..draft import Draft, Effects, TensorMeta


def rebase_results(draft: Draft) -> Draft:
    """Redirect the users of every result that shares memory with an argument of the op that returned it."""
    effects = dict(draft.effects)
    for node in draft.working_nodes():
        items = [user for user in node.users if draft.producer(user) is node]
        for value in (node, *items):
            result = effects[value].result
            if isinstance(result, TensorMeta) and result.storage not in effects[node].makes:
                _redirect(draft, node, value, result, effects)
    return replace(draft, effects=effects)


def _redirect(draft: Draft, node: fx.Node, value: fx.Node, result: TensorMeta, effects: dict[fx.Node, Effects]) -> None:
    owners = [arg for arg in node.all_input_nodes if _storage(effects[arg]) == result.storage]
    same = next((arg for arg in owners if effects[arg].result == result), None)
    if same is not None:
        value.replace_all_uses_with(same)
        return
    base = next((arg for arg in owners if _dtype(effects[arg]) == result.dtype), None)
    if base is not None and value.users:
        view = _view_of(draft, base, value, result)
        effects[view] = Effects(result=result)
        value.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)


def _view_of(draft: Draft, base: fx.Node, value: fx.Node, result: TensorMeta) -> fx.Node:
    graph = draft.gm.graph
    with graph.inserting_after(value):
        view = graph.call_function(torch.as_strided)
    with graph.inserting_before(view):
        shape, stride, (offset,) = (
            [build_expr(expr_of(size), draft.symbols, graph) for size in part]
            for part in (result.shape, result.stride, (result.offset,))
        )
        view.args = (base, shape, stride, offset)
    view.meta.update(value.meta)
    return view


def _storage(effects: Effects) -> int | None:
    return effects.result.storage if isinstance(effects.result, TensorMeta) else None


def _dtype(effects: Effects) -> torch.dtype | None:
    return effects.result.dtype if isinstance(effects.result, TensorMeta) else None
