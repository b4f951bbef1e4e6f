"""Take wrapper subclasses of Tensor (DTensor, quantised weights) out of Dynamo's graph, before anything is planned.

A captured piece reads and writes addresses, and a wrapper subclass has none of its own: it holds tensors that have. So
the graph is rewritten to take and give those. A node that no wrapper subclass takes part in stays as it is; any other
is run once, on fake tensors, and what it dispatches on the tensors that its arguments hold takes its place.

    weight: DTensor                                   weight_local
    y = linear(x, weight)                             t = aten.t(weight_local)
    z = y.redistribute(placements=[Replicate()])  ->  y = aten.mm(x, t)
                                                      r = _c10d_functional.all_reduce(y, "sum", "0")
                                                      z = _c10d_functional.wait_tensor(r)

From then on there are only plain tensors: effects, slots, the key of a program and the address checks need to know of
nothing else. Dynamo guards what the class says beside its tensors (placements, the layout of a mesh, block sizes), so
that is part of the rewritten graph. Meshes and groups are constants of it: equal meshes have the same processes.

The whole graph is one trace, plain nodes included: a subclass may keep a tensor between two ops where nobody sees it,
as the mask of a sharded embedding is kept by the placement of its result until that is reduced. Autocast has had its
say where ops are dispatched, so it is off around what takes a node's place. A graph without wrapper subclasses is
handed on untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..compat.dispatch import OpOverload, Tree, op_name, pytree
from ..compat.dynamo import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    MODE_SWITCHES,
    autocast_state,
    fake_of,
    is_fake,
    keep_break_reason,
    module_of,
    restore_autocast,
    symbolic_fake_inputs,
)
from ..compat.subclasses import (
    Trace,
    is_distributed,
    is_opaque,
    is_wrapper_subclass,
    layouts_of,
    reach,
    trace_in_plain_tensors,
)
from ..compat.symbols import build_expr, expr_of
from ..errors import Dsv4Error, UnsupportedInputError
from .plain_graph import MadeResult, Numbers, OwnArgument, PlainGraph, PlainResult, Result
from .plain_inputs import InnerInputs, Wrapped, checked_recipe
from .source_lines import where
from .traced import Value
from .tracing import refuse_training
from .untold_sizes import with_all_sizes
from .wrapper_calls import calls_body, operands_of

if TYPE_CHECKING:
    from ..compat.dynamo import FakeTensorMode

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LINES = ("stack_trace", "nn_module_stack", "source_fn_stack")  # what is known of where a node comes from


def in_plain_tensors(gm: fx.GraphModule, example_inputs: Sequence[Value]) -> PlainGraph:
    """The graph itself, or one that does the same on the tensors which wrapper subclasses hold.

    Args:
        gm: Dynamo's graph; it is not changed.
        example_inputs: one real tensor or SymInt per placeholder.

    Raises:
        TrainingError: grad is enabled and an input requires grad.
        UnsupportedInputError: a wrapper subclass cannot be taken apart, or a node does to one what no op on the tensors
            that it holds tells.
    """
    if not (_has_subclass(example_inputs) or _works_on_subclasses(gm)):
        return with_all_sizes(gm, example_inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    refuse_training(placeholders, example_inputs)
    mode, fakes = symbolic_fake_inputs(example_inputs, gm)
    inputs = InnerInputs(placeholders, example_inputs, fakes)
    run = _PlainRun(gm, inputs, mode)
    with _modes_kept():
        traced = trace_in_plain_tensors(run, inputs.values, mode)
    plain = _Rewriting(traced, inputs, run).module()
    keep_break_reason(plain, gm)
    return PlainGraph(
        gm=plain,
        example_inputs=list(inputs.examples(example_inputs)),
        inputs=tuple(inputs.plain),
        results=run.results,
        unguarded=tuple(inputs.unguarded),
        original=gm,
    )


def _has_subclass(value: object) -> bool:
    return any(map(is_wrapper_subclass, pytree.tree_leaves(value)))


def _works_on_subclasses(gm: fx.GraphModule) -> bool:
    """Whether there are any in a graph, or in a body of it."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(_has_subclass(node.meta.get("example_value")) for graph in graphs for node in graph.nodes)


@contextmanager
def _modes_kept() -> Iterator[None]:
    autocast, grad = autocast_state(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        restore_autocast(autocast)


class _PlainRun:
    """Runs Dynamo's graph in a trace: plain nodes are added to it as they are, others by what they dispatch.

    Args:
        gm: the graph.
        inputs: what stands for its inputs.
        mode: of the fakes.

    Attributes:
        results: how the results of a call are made of what the trace returns.
        copies: nodes of the trace with the nodes of Dynamo's graph that they are copies of.
        origins: other nodes of the trace, with those that have dispatched them.
    """

    def __init__(self, gm: fx.GraphModule, inputs: InnerInputs, mode: FakeTensorMode) -> None:
        self._gm, self._inputs, self._mode = gm, inputs, mode
        self.results: tuple[Result, ...] = ()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.origins: dict[fx.Node, fx.Node] = {}
        self._values: dict[fx.Node, Value] = {}
        self._operands: dict[fx.Node, Any] = {}  # what stands for the results of plain nodes
        # made before the trace, which would show it
        self._fakes = {node: self._fake(node) for node in gm.graph.nodes if node.op not in ("placeholder", "output")}

    def _fake(self, node: fx.Node) -> Value:
        if node.op == "get_attr":
            value: Value = attrgetter(str(node.target))(self._gm)
            return self._mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value
        value = node.meta.get("example_value")
        if _has_subclass(value):
            return None
        return pytree.tree_map_only(Tensor, lambda tensor: fake_of(self._mode, tensor), value)

    def __call__(self, *values: Value) -> tuple[Value, ...]:
        """Run it on what stands for its inputs; returns what its results are made of."""
        self._trace = Trace()
        wrapped = self._inputs.bind(values, self._values)
        output: Value = None
        for node in self._gm.graph.nodes:
            if node.op == "output":
                output = fx.node.map_aggregate(node.args[0], self._value_of)
            elif node.op != "placeholder":
                self._run(node)
        for one in wrapped:
            one.check_unchanged()
        given = _Given(wrapped)
        self.results = tuple(map(given.result, output))
        return tuple(given.values)

    def _value_of(self, leaf: Any) -> Any:
        return self._values[leaf] if isinstance(leaf, fx.Node) else leaf

    def _run(self, node: fx.Node) -> None:
        if node.target in MODE_SWITCHES:  # in force for what is dispatched from here on
            assert callable(node.target), "it is a function"
            token = node.target(*fx.node.map_aggregate(node.args, self._value_of))
            self._add(node, token)
        elif node.target is getitem and isinstance(items := self._value_of(node.args[0]), (tuple, list)):
            self._take(node, items)
        elif self._is_plain(node):
            self._add(node, self._fakes[node])
        else:
            self._dispatch(node)

    def _take(self, node: fx.Node, items: Sequence[Value]) -> None:
        """An item of a container, which is a node only if the container is one."""
        if node.args[0] in self._operands and not _has_subclass(items):
            self._add(node, self._fakes[node])
        else:
            index: Any = node.args[1]
            self._values[node] = items[index]

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether no wrapper subclass takes part in a node."""
        values = [self._values[arg] for arg in node.all_input_nodes]
        if _has_subclass(values) or _has_subclass(node.meta.get("example_value")):
            return False
        leaves = pytree.tree_leaves(values)
        bodies = [leaf for leaf in leaves if isinstance(leaf, fx.GraphModule)]
        return not any(map(is_opaque, leaves)) and not any(map(_works_on_subclasses, bodies))

    def _add(self, node: fx.Node, value: Value) -> None:
        """Add a node as it is."""
        target: Any = node.target
        if node.op == "get_attr":
            target = str(target).replace(".", "_")
            setattr(self._trace.root, target, attrgetter(str(node.target))(self._gm))
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._operand_of)
        self._operands[node] = operand = self._trace.add(node, args, kwargs, target, value)
        self._values[node] = value
        self.copies[operand.node] = node

    def _operand_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        if leaf in self._operands:
            return self._operands[leaf]
        return pytree.tree_map(self._trace.operand_of, self._values[leaf])

    def _dispatch(self, node: fx.Node) -> None:
        """Run a node, so that what it dispatches is added."""
        before = self._trace.last()
        is_on = [(kind, dtype) for kind, enabled, dtype in autocast_state() if enabled]
        cache = torch.is_autocast_cache_enabled()
        scopes = [self._trace.call(ENTER_AUTOCAST, kind, dtype, False, cache) for kind, dtype in is_on]
        self._values[node] = self._called(node)
        for scope in reversed(scopes):
            self._trace.call(EXIT_AUTOCAST, scope)
        added = self._trace.last()
        while added is not before:
            self.origins[added] = node
            added = added.prev

    def _called(self, node: fx.Node) -> Value:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._value_of)
        try:
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            if calls_body(node) and isinstance(args[0], fx.GraphModule):
                return fx.Interpreter(args[0]).run(*operands_of(node, args))
            assert callable(node.target), "Dynamo calls no modules"
            return node.target(*args, **kwargs)
        except Dsv4Error:
            raise
        except Exception as error:  # whatever the class, or torch, raises
            raise UnsupportedInputError(
                f"{node.name} cannot be told in ops on plain tensors ({where(node)}): {self._inputs.told(node)}"
                f"{type(error).__name__}: {error}. Give it plain tensors (`to_local` of a DTensor), or keep it outside "
                "of the model"
            ) from error

    def has_dtensor(self, node: fx.Node) -> bool:
        """Whether a DTensor takes part in a node of Dynamo's graph."""
        values = [self._values[node], *(self._values[arg] for arg in node.all_input_nodes)]
        return any(map(is_distributed, pytree.tree_leaves(values)))


class _Given:
    """Collects what the results of a call are made of."""

    def __init__(self, wrapped: Sequence[Wrapped]) -> None:
        self.values: list[Value] = []
        self._own = {id(one.tensor): OwnArgument(one.position) for one in wrapped}
        self._made: dict[int, MadeResult] = {}

    def result(self, value: Tree) -> Result:
        """How a result is made."""
        if id(value) in self._own:
            return self._own[id(value)]
        if not is_wrapper_subclass(value):
            return PlainResult(self._give(value))
        if id(value) not in self._made:
            recipe = checked_recipe(value, "a result")
            layouts = tuple((self._numbers(size), self._numbers(stride)) for size, stride in layouts_of(value, recipe))
            tensors = tuple(self._give(reach(value, path)) for path in recipe.paths())
            self._made[id(value)] = MadeResult(recipe, tensors, layouts)
        return self._made[id(value)]

    def _give(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _numbers(self, numbers: Sequence[Value]) -> Numbers:
        return tuple(PlainResult(self._give(n)) if isinstance(n, torch.SymInt) else int(n) for n in numbers)


class _Rewriting:
    """Copies a trace to the graph that is handed on: nodes described as Dynamo's are, sizes told by the inputs.

    Args:
        traced: the trace.
        inputs: what the graph takes.
        run: that made it.
    """

    def __init__(self, traced: fx.GraphModule, inputs: InnerInputs, run: _PlainRun) -> None:
        self._traced, self._inputs, self._run = traced, inputs, run
        self._graph = fx.Graph()
        self._env: dict[fx.Node, Any] = {}

    def module(self) -> fx.GraphModule:
        """The graph as a module."""
        given = self._traced.graph.find_nodes(op="placeholder")
        for index, (node, name) in enumerate(zip(given, self._inputs.names, strict=True)):
            copy = self._env[node] = self._graph.placeholder(name)
            self._inputs.describe_placeholder(index, copy)
        self._symbols = {symbol: self._env[given[index]] for symbol, index in self._inputs.symbols.items()}
        for node in self._traced.graph.nodes:
            if node.op == "output":
                self._graph.output(tuple(map(self._present, node.args[0])))
            elif node.op != "placeholder":
                self._env[node] = self._copied(node)
        for node in reversed(self._graph.nodes):
            if not node.users and (node.target is getitem or self._is_size(node)):
                self._graph.erase_node(node)
        return module_of(self._traced, self._graph)

    def _present(self, arg: Any) -> Any:
        return self._env[arg] if isinstance(arg, fx.Node) else arg

    def _is_size(self, node: fx.Node) -> bool:
        return node.op == "call_function" and isinstance(node.meta.get("example_value"), _SYMBOLIC)

    def _copied(self, node: fx.Node) -> Any:
        """The copy of a node, or the number that it would compute of sizes that are inputs."""
        original = self._run.copies.get(node)
        value = node.meta.get("val")
        if original is None and isinstance(value, torch.SymInt) and expr_of(value).free_symbols <= self._symbols.keys():
            number = build_expr(expr_of(value), self._symbols, self._graph)
            if isinstance(number, fx.Node):
                number.meta.setdefault("example_value", value)
            return number
        copy = self._graph.node_copy(node, lambda arg: self._env[arg])
        if original is not None:
            copy.meta = dict(original.meta)
            return copy
        origin = self._run.origins.get(node)
        lines = {} if origin is None else {key: origin.meta[key] for key in _LINES if key in origin.meta}
        copy.meta = {**lines, "example_value": value}
        self._check(node, origin)
        return copy

    def _check(self, node: fx.Node, origin: fx.Node | None) -> None:
        """Refuse what a graph cannot repeat."""
        line = "" if origin is None else f" ({where(origin)})"
        if node.op == "get_attr" and is_fake(attrgetter(str(node.target))(self._traced)):
            raise UnsupportedInputError(
                f"a tensor that no input holds is used{line}: its class keeps it from before the model was called. "
                "Make it a buffer, or keep what uses it outside of the model"
            )
        op = random_op(node)
        if op is not None and origin is not None and self._run.has_dtensor(origin):
            raise UnsupportedInputError(
                f"{origin.name} draws random numbers for a DTensor with {op}{line}, from a state that this version of "
                "torch sets on the host before and after: draw them outside of the model"
            )


def random_op(node: fx.Node) -> str | None:
    """The op of a node that draws random numbers on a device other than the CPU, where DTensor moves the generator."""
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(value, Tensor) or value.is_cpu:
        return None
    return op_name(node.target) if torch.Tag.nondeterministic_seeded in node.target.tags else None
