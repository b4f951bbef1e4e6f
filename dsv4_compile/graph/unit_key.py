"""When two units may run the same code."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping

from torch import fx

from ..compat.symbols import expr_of, size_text
from .partitioned import Unit
from .traced import TensorMeta, TracedGraph

UnitKey = tuple[Hashable, ...]


def unit_key(traced: TracedGraph, unit: Unit, scalars: Mapping[fx.Node, float]) -> UnitKey:
    """Equal for two units only if the same code may run for both.

    Nodes by number, targets, constants, the layout of every input (shape, strides, dtype, device, lazy bits), and which
    inputs share a storage, at which distance. Offsets into a storage alone mean nothing: code counts from the base of a
    view.

    Args:
        traced: the graph.
        unit: a piece, or a subgraph of one.
        scalars: from `TracedGraph.scalars`; compiled code holds them as constants.
    """
    numbers = {node: index for index, node in enumerate(unit.gm.graph.nodes)}
    steps = tuple(_step_key(unit.gm, node, numbers) for node in unit.gm.graph.nodes)
    return steps, tuple(_input_key(traced, node, scalars) for node in unit.inputs), _sharing(traced, unit)


def _step_key(gm: fx.GraphModule, node: fx.Node, numbers: Mapping[fx.Node, int]) -> UnitKey:
    if node.op == "placeholder":
        return ("placeholder",)
    if node.op == "get_attr":
        # a constant is the same only if it is that object
        return ("get_attr", id(operator.attrgetter(str(node.target))(gm)))
    # the null byte keeps a node's number apart from any text among the arguments
    args = fx.map_arg((node.args, node.kwargs), lambda arg: f"\0{numbers[arg]}")
    return (node.op, node.target, repr(args))


def _input_key(traced: TracedGraph, node: fx.Node, scalars: Mapping[fx.Node, float]) -> UnitKey:
    if node in scalars:
        return ("scalar", repr(scalars[node]))  # 0.0 is not -0.0, and NaN is itself
    meta = traced.effects[node].result
    if not isinstance(meta, TensorMeta):
        return (node.name,)  # sizes are the same only if they are the same symbol
    layouts = (meta.shape, meta.stride)
    return (*(tuple(map(size_text, subgraph)) for subgraph in layouts), meta.dtype, meta.device, meta.conj, meta.neg)


def _sharing(traced: TracedGraph, unit: Unit) -> tuple[tuple[int, str], ...]:
    """For each tensor taken, the first one with the same storage, and how far after that one it begins."""
    metas = [meta for node in unit.inputs if isinstance(meta := traced.effects[node].result, TensorMeta)]
    first: dict[int, tuple[int, TensorMeta]] = {}
    found = []
    for index, meta in enumerate(metas):
        owner, base = first.setdefault(meta.storage, (index, meta))
        found.append((owner, str(expr_of(meta.offset) - expr_of(base.offset))))
    return tuple(found)
