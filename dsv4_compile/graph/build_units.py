"""Make the graphs of units: each computes its own compute nodes and the view nodes that these need.

    v = h[:2]   (view)                 piece_0(h):  v = h[:2]; a = v + 1
    a = v + 1   piece_0       ->       piece_1(h):  v = h[:2]; b = v * 2
    b = v * 2   piece_1

A view node that several units need is computed in each of them, from the base. Modes that a node was traced under are
entered and left around it, within the unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ..compat.dispatch import pytree
from ..compat.dynamo import module_of
from ..compat.symbols import expr_of
from .collective_call import callee
from .mode_scopes import ModeScope, run_steps
from .partitioned import Unit, UnitKind
from .traced import TensorMeta, TracedGraph

Run = tuple[UnitKind, tuple[fx.Node, ...]]


@dataclass
class _Closure:
    """What one unit computes (its compute nodes and the view nodes they need) and what it takes from outside."""

    local: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    seen: set[fx.Node] = field(default_factory=set)


def build_units(
    traced: TracedGraph,
    runs: Sequence[Run],
    names: Sequence[str],
    home: Mapping[fx.Node, int],
    shared: frozenset[fx.Node],
    wanted: frozenset[fx.Node] = frozenset(),
) -> list[Unit]:
    """The unit of each run, with the view nodes it needs.

    Args:
        traced: the graph.
        runs: kind and compute nodes of each unit.
        names: of the units.
        home: index of the run that each compute node is in; anything else for nodes that are in none of them.
        shared: allocations that are made outside of the units.
        wanted: results that somebody else takes too.
    """
    closures = _closures(traced, runs, home, shared)
    taken = wanted.union(node for closure in closures for node in closure.inputs)
    units = []
    for index, (name, (kind, nodes)) in enumerate(zip(names, runs, strict=True)):
        given = [n for n in closures[index].local if n in taken and home.get(traced.producer(n)) == index]
        units.append(_build_unit(traced, kind, name, nodes, closures[index], given))
    return units


def _closures(
    traced: TracedGraph, runs: Sequence[Run], home: Mapping[fx.Node, int], shared: frozenset[fx.Node]
) -> list[_Closure]:
    outputs = traced.gm.graph.output_node().all_input_nodes
    return [_close(traced, index, nodes or outputs, home, shared) for index, (_, nodes) in enumerate(runs)]


def shared_allocations(traced: TracedGraph, runs: Sequence[Run], home: Mapping[fx.Node, int]) -> frozenset[fx.Node]:
    """Allocations that more than one unit touches; one of whose shape another allocation is made does not count."""
    every = frozenset(node for node, effects in traced.effects.items() if effects.only_allocates and effects.is_view)
    touched = Counter(node for closure in _closures(traced, runs, home, every) for node in closure.inputs)
    return frozenset(node for node in every if touched[node] > 1)


def _close(
    traced: TracedGraph, index: int, roots: Sequence[fx.Node], home: Mapping[fx.Node, int], shared: frozenset[fx.Node]
) -> _Closure:
    """Collect what unit `index` computes and what it takes, each once, in order of first use."""
    closure = _Closure()
    for root in roots:
        for wanted in (root, *traced.items(root)):
            _collect(traced, index, wanted, home, shared, closure)
    return closure


def _collect(
    traced: TracedGraph,
    index: int,
    wanted: fx.Node,
    home: Mapping[fx.Node, int],
    shared: frozenset[fx.Node],
    closure: _Closure,
) -> None:
    """Add a node after all that it needs; with a stack, since a chain of views may be long."""
    stack = [(wanted, False)]
    while stack:
        node, has_its_arguments = stack.pop()
        if has_its_arguments:
            closure.local.append(node)
        elif node not in closure.seen:
            closure.seen.add(node)
            given = node.op == "placeholder" or node in shared or traced.effects[node].bucket_scalar
            if given or home.get(traced.producer(node), index) != index:
                closure.inputs.append(node)
                continue
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.all_input_nodes))


def _build_unit(
    traced: TracedGraph,
    kind: UnitKind,
    name: str,
    nodes: tuple[fx.Node, ...],
    closure: _Closure,
    outputs: list[fx.Node],
) -> Unit:
    inputs = _with_sizes(traced, closure.inputs)
    graph = fx.Graph()
    env = {node: graph.placeholder(node.name) for node in inputs}
    for node in inputs:
        env[node].meta.update(node.meta)
    _emit(graph, closure.local, env)
    if kind == "output assembly":
        graph.output(fx.map_arg(traced.gm.graph.output_node().args[0], lambda arg: env[arg]))
    else:
        graph.output(tuple(env[node] for node in outputs))
    gm = module_of(traced.gm, graph, name)
    body = tuple(closure.local)
    return Unit(kind=kind, name=name, nodes=nodes, body=body, gm=gm, inputs=tuple(inputs), outputs=tuple(outputs))


def _with_sizes(traced: TracedGraph, inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The inputs, with every size symbol of their shapes, sizes first: no piece may meet a symbol it was not given."""
    wanted = {node for node in inputs if node in traced.symbols.values()}
    for node in inputs:
        for meta in pytree.tree_leaves(traced.effects[node].result):
            if isinstance(meta, TensorMeta):
                layout = (*meta.shape, *meta.stride, meta.offset)
                symbols = {symbol for size in layout for symbol in expr_of(size).free_symbols}
                wanted |= {traced.symbols[symbol] for symbol in symbols if symbol in traced.symbols}
    sizes = [i.node for i in traced.inputs if i.node in wanted]
    return sizes + [node for node in inputs if node not in wanted]


def _emit(graph: fx.Graph, nodes: Sequence[fx.Node], env: dict[fx.Node, fx.Node]) -> None:
    """Copy nodes into a graph, with the modes that they were traced under entered and left around them."""
    entered: list[tuple[ModeScope, fx.Node]] = []
    steps, left_over = run_steps(nodes)
    for step in steps:
        _leave(graph, entered, step.leave)
        entered += [(scope, graph.call_function(scope.enter, scope.args)) for scope in step.enter]  # type: ignore[arg-type]
        env[step.node] = graph.node_copy(step.node, lambda arg: env[arg])
        env[step.node].target = callee(step.node)
    _leave(graph, entered, left_over)


def _leave(graph: fx.Graph, entered: list[tuple[ModeScope, fx.Node]], count: int) -> None:
    for _ in range(count):
        scope, token = entered.pop()
        graph.call_function(scope.leave, (token,) if scope.leave_args is None else scope.leave_args)  # type: ignore[arg-type]
