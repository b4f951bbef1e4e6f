"""Cut the graph into pieces and regions: maximal runs of working nodes with one fate, in program order.

    mm, (view), attn!, (view), mqa!, mm     ->    piece_0: mm | region_0: attn, mqa | piece_1: mm

Free nodes join no run: each unit that needs a view computes it from the base (a view made before a mutation shows it
just the same), so only tensors that own their memory, and numbers, cross. An allocation that several units touch is
made outside of all of them, since it stands for a slot of the workspace. Every run holds a working node, so there is no
empty piece and none of views or allocations alone. The epilogue is what is left: views that only the caller sees.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import fx

from ..compat import ENTER_AUTOCAST, EXIT_AUTOCAST, expr_of, module_of, pytree
from ..draft import Draft, TensorMeta, Unit
from .scope_modes import autocast_of

Kind = Literal["piece", "region", "epilogue"]
Run = tuple[Kind, tuple[fx.Node, ...]]


@dataclass
class _Closure:
    """What one unit computes (its working nodes and the free ones they need) and what it takes from outside."""

    local: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    seen: set[fx.Node] = field(default_factory=set)


def partition_graph(draft: Draft) -> Draft:
    """Fill in `units`, `allocations` and `epilogue`."""
    runs: list[Run] = [*_runs(draft), ("epilogue", ())]
    home = {node: index for index, (_, nodes) in enumerate(runs) for node in nodes}
    shared = shared_allocations(draft, runs, home)
    units = build_units(draft, runs, _names(runs), home, shared)
    in_order = tuple(node for node in draft.gm.graph.nodes if node in shared)
    return replace(draft, units=tuple(units[:-1]), epilogue=units[-1], allocations=in_order)


def build_units(
    draft: Draft,
    runs: Sequence[Run],
    names: Sequence[str],
    home: Mapping[fx.Node, int],
    shared: frozenset[fx.Node],
    wanted: frozenset[fx.Node] = frozenset(),
) -> list[Unit]:
    """The unit of each run, with the free nodes it needs.

    Args:
        draft: the graph.
        runs: kind and working nodes of each unit.
        names: of the units.
        home: index of the run that each working node is in; anything else for nodes that are in none of them.
        shared: allocations that are made outside of the units.
        wanted: results that somebody else takes too.
    """
    closures = _closures(draft, runs, home, shared)
    taken = wanted.union(node for closure in closures for node in closure.inputs)
    units = []
    for index, (name, (kind, nodes)) in enumerate(zip(names, runs, strict=True)):
        given = [n for n in closures[index].local if n in taken and home.get(draft.producer(n)) == index]
        units.append(_build_unit(draft, kind, name, nodes, closures[index], given))
    return units


def _runs(draft: Draft) -> Iterator[Run]:
    for is_eager, nodes in itertools.groupby(draft.working_nodes(), key=lambda node: node in draft.eager):
        yield ("region" if is_eager else "piece"), tuple(nodes)


def _names(runs: Sequence[Run]) -> list[str]:
    counts: Counter[str] = Counter()
    names = []
    for kind, _ in runs:
        names.append("epilogue" if kind == "epilogue" else f"{kind}_{counts[kind]}")
        counts[kind] += 1
    return names


def _closures(
    draft: Draft, runs: Sequence[Run], home: Mapping[fx.Node, int], shared: frozenset[fx.Node]
) -> list[_Closure]:
    outputs = draft.gm.graph.output_node().all_input_nodes
    return [_close(draft, index, nodes or outputs, home, shared) for index, (_, nodes) in enumerate(runs)]


def shared_allocations(draft: Draft, runs: Sequence[Run], home: Mapping[fx.Node, int]) -> frozenset[fx.Node]:
    """Allocations that more than one unit touches; one of whose shape another allocation is made does not count."""
    every = frozenset(node for node, effects in draft.effects.items() if effects.only_allocates and effects.is_free)
    touched = Counter(node for closure in _closures(draft, runs, home, every) for node in closure.inputs)
    return frozenset(node for node in every if touched[node] > 1)


def _close(
    draft: Draft, index: int, roots: Sequence[fx.Node], home: Mapping[fx.Node, int], shared: frozenset[fx.Node]
) -> _Closure:
    """Collect what unit `index` computes and what it takes, each once, in order of first use."""
    closure = _Closure()
    for root in roots:
        for wanted in (root, *draft.items(root)):
            _collect(draft, index, wanted, home, shared, closure)
    return closure


def _collect(
    draft: Draft,
    index: int,
    wanted: fx.Node,
    home: Mapping[fx.Node, int],
    shared: frozenset[fx.Node],
    closure: _Closure,
) -> None:
    """Add a node behind all that it needs; with a stack, since a chain of views may be long."""
    stack = [(wanted, False)]
    while stack:
        node, has_its_arguments = stack.pop()
        if has_its_arguments:
            closure.local.append(node)
        elif node not in closure.seen:
            closure.seen.add(node)
            given = node.op == "placeholder" or node in shared or draft.effects[node].bucket_scalar
            if given or home.get(draft.producer(node), index) != index:
                closure.inputs.append(node)
                continue
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.all_input_nodes))


def _build_unit(
    draft: Draft, kind: Kind, name: str, nodes: tuple[fx.Node, ...], closure: _Closure, outputs: list[fx.Node]
) -> Unit:
    inputs = _with_sizes(draft, closure.inputs)
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in inputs}
    for node in inputs:
        env[node].meta.update(node.meta)
    _emit(graph, closure.local, env)
    if kind == "epilogue":
        graph.output(fx.map_arg(draft.gm.graph.output_node().args[0], lambda arg: env[arg]))
    else:
        graph.output(tuple(env[node] for node in outputs))
    gm = module_of(draft.gm, graph, name)
    body = tuple(closure.local)
    return Unit(kind=kind, name=name, nodes=nodes, body=body, gm=gm, inputs=tuple(inputs), outputs=tuple(outputs))


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


def _emit(graph: fx.Graph, nodes: Sequence[fx.Node], env: dict[fx.Node, fx.Node]) -> None:
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
