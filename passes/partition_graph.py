"""Cut the graph into pieces and regions: maximal runs of working nodes with one fate, in program order.

    mm, (view), attn!, (view), mqa!, mm     ->    piece_0: mm | region_0: attn, mqa | piece_1: mm

Free nodes join no run: each unit that needs a view computes it from the base (a view made before a mutation shows it
just the same), so only tensors that own their memory, and numbers, cross. An allocation belongs to the first unit that
touches it and crosses as a base. Since every run holds a working node, there is no empty piece and none of views or
allocations alone.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..compat import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED, expr_of
from ..draft import Draft, TensorMeta, Unit
from .scope_modes import autocast_of

Kind = Literal["piece", "region"]


@dataclass
class _Closure:
    """What one unit computes (its working nodes and the free ones they need) and what it takes from outside."""

    local: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)


def partition_graph(draft: Draft) -> Draft:
    """Fill in `units` and `stitched`."""
    runs = list(_runs(draft))
    home = {node: index for index, (_, nodes) in enumerate(runs) for node in nodes}
    closures = [_close(draft, index, nodes, home) for index, (_, nodes) in enumerate(runs)]
    outputs = draft.gm.graph.output_node()
    outside = _close(draft, len(runs), outputs.all_input_nodes, home)
    taken = {node for closure in (*closures, outside) for node in closure.inputs}
    units = []
    for index, (name, (kind, nodes)) in enumerate(zip(_names(runs), runs, strict=True)):
        given = [node for node in closures[index].local if node in taken and home.get(draft.producer(node)) == index]
        units.append(_build_unit(draft, kind, name, nodes, closures[index], given))
    return replace(draft, units=tuple(units), stitched=_stitch(draft, units, outside))


def _runs(draft: Draft) -> Iterator[tuple[Kind, tuple[fx.Node, ...]]]:
    for is_eager, nodes in itertools.groupby(draft.working_nodes(), key=lambda node: node in draft.eager):
        yield ("region" if is_eager else "piece"), tuple(nodes)


def _names(runs: Sequence[tuple[Kind, tuple[fx.Node, ...]]]) -> list[str]:
    counts = {"piece": itertools.count(), "region": itertools.count()}
    return [f"{kind}_{next(counts[kind])}" for kind, _ in runs]


def _close(draft: Draft, index: int, roots: Sequence[fx.Node], home: dict[fx.Node, int]) -> _Closure:
    """Collect what unit `index` computes and takes; an allocation nobody has touched yet gets its home here."""
    closure = _Closure()
    seen: set[fx.Node] = set()

    def visit(node: fx.Node) -> None:
        if node in seen:
            return
        seen.add(node)
        given = node.op == "placeholder" or draft.effects[node].bucket_scalar
        if given or home.get(draft.producer(node), index) != index:
            closure.inputs.append(node)
            return
        for arg in node.all_input_nodes:
            visit(arg)
        if draft.effects[node].only_allocates:
            home.setdefault(node, index)
        closure.local.append(node)

    for root in roots:
        visit(root)
        for item in sorted(user for user in root.users if draft.producer(user) is root):
            visit(item)
    return closure


def _build_unit(
    draft: Draft, kind: Kind, name: str, nodes: tuple[fx.Node, ...], closure: _Closure, outputs: list[fx.Node]
) -> Unit:
    inputs = _with_sizes(draft, closure.inputs)
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in inputs}
    for node in inputs:
        env[node].meta.update(node.meta)
    emit_nodes(graph, closure.local, env)
    graph.output(tuple(env[node] for node in outputs))
    gm = fx.GraphModule(draft.gm, graph, class_name=name)
    return Unit(kind=kind, name=name, nodes=nodes, gm=gm, inputs=tuple(inputs), outputs=tuple(outputs))


def _with_sizes(draft: Draft, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The inputs, with every size symbol of their shapes, sizes first: no piece may meet a symbol it was not given."""
    wanted = {node for node in inputs if node in draft.symbols.values()}
    for node in inputs:
        for meta in pytree.tree_leaves(draft.effects[node].result):
            if isinstance(meta, TensorMeta):
                layout = (*meta.shape, *meta.stride, meta.offset)
                symbols = {symbol for size in layout for symbol in expr_of(size).free_symbols}
                wanted |= {draft.symbols[symbol] for symbol in symbols if symbol in draft.symbols}
    sizes = [i.node for i in draft.inputs if i.node in wanted]
    return sizes + [node for node in inputs if node not in wanted]


def emit_nodes(graph: fx.Graph, nodes: Sequence[fx.Node], env: dict[fx.Node, fx.Node]) -> None:
    """Copy nodes into a graph, with autocast entered and left around those that ran under it."""
    scopes: tuple[tuple[object, ...], ...] = ()
    entered: list[fx.Node] = []
    for node in nodes:
        wanted = autocast_of(node)
        if wanted != scopes and node.op != "get_attr":
            _leave(graph, entered)
            entered = [graph.call_function(ENTER_AUTOCAST, scope) for scope in wanted]
            scopes = wanted
        env[node] = graph.node_copy(node, lambda arg: env[arg])
    _leave(graph, entered)


def _leave(graph: fx.Graph, entered: list[fx.Node]) -> None:
    while entered:
        graph.call_function(EXIT_AUTOCAST, (entered.pop(),))


def _stitch(draft: Draft, units: Sequence[Unit], outside: _Closure) -> fx.GraphModule:
    """The module that calls the units one after another and makes the outputs, by views, of what they return."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for graph_input in draft.inputs:
        env[graph_input.node] = graph.node_copy(graph_input.node)
    emit_nodes(graph, [node for node in draft.gm.graph.nodes if draft.effects[node].bucket_scalar], env)
    for unit in units:
        call = graph.call_module(unit.name, tuple(env[node] for node in unit.inputs))
        for position, node in enumerate(unit.outputs):
            env[node] = graph.call_function(operator.getitem, (call, position))
    emit_nodes(graph, outside.local, env)
    if draft.leaves_grad is not None:
        graph.call_function(SET_GRAD_ENABLED, (draft.leaves_grad,))
    original = draft.gm.graph.output_node()
    graph.output(fx.map_arg(original.args[0], lambda arg: env[arg]))
    return fx.GraphModule(_holder(draft, units, outside), graph, class_name="stitched")


def _holder(draft: Draft, units: Sequence[Unit], outside: _Closure) -> torch.nn.Module:
    holder = torch.nn.Module()
    for unit in units:
        holder.add_module(unit.name, unit.gm)
    for node in outside.local:
        if node.op == "get_attr":
            setattr(holder, str(node.target), getattr(draft.gm, str(node.target)))
    return holder
