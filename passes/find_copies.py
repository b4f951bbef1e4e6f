"""Find pieces that are the same up to their weights, so that each is compiled once.

    piece_1: linear(h, w_1)     piece_2: linear(h, w_2)     ->    piece_2 is a copy of piece_1

Weights are inputs of a piece, so layers of one kind give equal pieces. Nearly equal ones (another constant, another
axis, another stride) never match: the key holds all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from ..compat import expr_of, size_text
from ..draft import Draft, TensorMeta, Unit


def find_copies(draft: Draft) -> Draft:
    """Fill in `copies`: for each piece that is the same as an earlier one, the name of that one."""
    scalars = draft.scalars()
    first: dict[Any, str] = {}
    copies: dict[str, str] = {}
    for unit in draft.units:
        if unit.kind == "piece":
            original = first.setdefault(piece_key(draft, unit, scalars), unit.name)
            if original != unit.name:
                copies[unit.name] = original
    return replace(draft, copies=copies)


def piece_key(draft: Draft, unit: Unit, scalars: Mapping[fx.Node, float]) -> tuple[Any, ...]:
    """Equal for two pieces only if the same code may run for both.

    Nodes by number, targets, constants, the layout of every input (shape, strides, dtype, device), and which inputs
    share a storage, how far apart. Offsets into a storage alone mean nothing: code counts from the base of a view.

    Args:
        draft: the graph.
        unit: the piece, or a part of one.
        scalars: from `Draft.scalars`; compiled code holds them as constants.
    """
    numbers = {node: index for index, node in enumerate(unit.gm.graph.nodes)}
    steps = tuple(_step_key(unit.gm, node, numbers) for node in unit.gm.graph.nodes)
    return steps, tuple(_input_key(draft, node, scalars) for node in unit.inputs), _sharing(draft, unit)


def _step_key(gm: fx.GraphModule, node: fx.Node, numbers: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    if node.op == "placeholder":
        return ("placeholder",)
    if node.op == "get_attr":
        # a constant is the same only if it is that object
        return ("get_attr", id(operator.attrgetter(str(node.target))(gm)))
    # the null byte keeps a node's number apart from any text among the arguments
    args = fx.map_arg((node.args, node.kwargs), lambda arg: f"\0{numbers[arg]}")
    return (node.op, node.target, repr(args))


def _input_key(draft: Draft, node: fx.Node, scalars: Mapping[fx.Node, float]) -> tuple[Any, ...]:
    if node in scalars:
        return ("scalar", repr(scalars[node]))  # 0.0 is not -0.0, and NaN is itself
    meta = draft.effects[node].result
    if not isinstance(meta, TensorMeta):
        return (node.name,)  # sizes are the same only if they are the same symbol
    layouts = (meta.shape, meta.stride)
    return (*(tuple(map(size_text, part)) for part in layouts), meta.dtype, meta.device)


def _sharing(draft: Draft, unit: Unit) -> tuple[tuple[int, str], ...]:
    """For each tensor taken, the first one with the same storage, and how far behind that one it begins."""
    metas = [meta for node in unit.inputs if isinstance(meta := draft.effects[node].result, TensorMeta)]
    first: dict[int, tuple[int, TensorMeta]] = {}
    found = []
    for place, meta in enumerate(metas):
        owner, base = first.setdefault(meta.storage, (place, meta))
        found.append((owner, str(expr_of(meta.offset) - expr_of(base.offset))))
    return tuple(found)
