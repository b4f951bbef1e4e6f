"""Take wrapper subclasses of Tensor (DTensor, quantised weights) out of Dynamo's graph, before anything is planned.

A captured piece reads and writes addresses, and a wrapper subclass has none of its own: it holds tensors that have. So
the graph is rewritten to take and give those. A node that no wrapper subclass takes part in stays as it is; any other
is traced once with the tensors that its arguments hold, and what it dispatches on these takes its place.

    weight: DTensor                                   weight_local
    y = linear(x, weight)                             t = aten.t(weight_local)
    z = y.redistribute(placements=[Replicate()])  ->  y = aten.mm(x, t)
                                                      r = _c10d_functional.all_reduce(y, "sum", "0")
                                                      z = _c10d_functional.wait_tensor(r)

From then on there are only plain tensors: effects, slots, the key of a program and the address checks need to know of
nothing else. Dynamo guards what the class says beside its tensors (placements, the layout of a mesh, block sizes), so
that is part of the rewritten graph. Meshes and groups are constants of it: equal meshes have the same processes.

Autocast has had its say where ops are dispatched, so it is off around what takes a node's place. A graph without
wrapper subclasses is handed on untouched.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor, fx

from ..compat.dispatch import OpOverload, Tree, op_name, pytree
from ..compat.dynamo import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    MODE_SWITCHES,
    InnerTensor,
    autocast_state,
    fake_of,
    keep_break_reason,
    module_of,
    note_inner_tensor,
    restore_autocast,
    source_of,
    symbolic_fake_inputs,
)
from ..compat.subclasses import (
    is_distributed,
    is_opaque,
    is_wrapper_subclass,
    layouts_of,
    reach,
    real_object,
    trace_in_plain_tensors,
)
from ..compat.symbols import build_expr, expr_of
from ..errors import Dsv4Error, UnsupportedInputError
from .plain_graph import MadeResult, Numbers, OwnArgument, PlainGraph, PlainInput, PlainResult, Result
from .plain_node import PlainCall, Wrapped, checked_recipe
from .source_lines import where
from .traced import Value
from .tracing import readable_name, refuse_training

if TYPE_CHECKING:
    from ..compat.dynamo import FakeTensorMode

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack")  # what is known of the lines of a node


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
        return PlainGraph(gm=gm, example_inputs=example_inputs)
    refuse_training(gm.graph.find_nodes(op="placeholder"), example_inputs)
    mode, fakes = symbolic_fake_inputs(example_inputs, gm)
    with _modes_kept():
        return _Desugaring(gm, mode).run(example_inputs, fakes)


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


class _Desugaring:
    """Copies a graph node by node; the nodes that wrapper subclasses take part in are replaced."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode) -> None:
        self._gm = gm
        self._mode = mode
        self._graph = fx.Graph()
        self._env: dict[fx.Node, Tree] = {}  # by node of Dynamo's graph: new nodes, `Wrapped`s, constants, containers
        self._fakes: dict[fx.Node, Value] = {}  # by new node; Dynamo's own fakes are of another mode
        self._symbols: dict[sympy.Symbol, fx.Node] = {}
        self._inputs: list[tuple[fx.Node, PlainInput]] = []
        self._unguarded: list[tuple[PlainInput, int]] = []
        self._constants: dict[str, object] = {}
        self._open: dict[fx.Node, object] = {}  # what entering a mode has given

    def run(self, example_inputs: Sequence[Value], fakes: Sequence[Value]) -> PlainGraph:
        """Rewrite the whole graph."""
        placeholders = self._gm.graph.find_nodes(op="placeholder")
        for position, (node, example, fake) in enumerate(zip(placeholders, example_inputs, fakes, strict=True)):
            self._add_input(position, node, example, fake)
        wrapped = [self._env[node] for node in placeholders if isinstance(self._env[node], Wrapped)]
        for one in wrapped:
            self._add_measures(one)
        for one in wrapped:
            layouts = layouts_of(one.value, one.recipe)
            one.layouts = tuple((self._numbers(size), self._numbers(stride)) for size, stride in layouts)
        results: tuple[Result, ...] = ()
        for node in self._gm.graph.nodes:
            if node.op == "output":
                results = self._finish(node)
            elif node.op != "placeholder":
                self._add(node)
        self._drop_unused()
        return PlainGraph(
            gm=self._module(),
            example_inputs=[
                self._fakes[node] if plain.measure else plain.of(example_inputs) for node, plain in self._inputs
            ],
            inputs=tuple(plain for _, plain in self._inputs),
            results=results,
            unguarded=tuple(self._unguarded),
            original=self._gm,
        )

    def _add_input(self, position: int, node: fx.Node, example: Value, fake: Value) -> None:
        if not is_wrapper_subclass(fake):
            copy = self._env[node] = self._graph.node_copy(node)
            self._fakes[copy] = real_object(fake)
            self._inputs.append((copy, PlainInput(position)))
            if isinstance(fake, torch.SymInt) and expr_of(fake).is_Symbol:
                self._symbols.setdefault(expr_of(fake), copy)
            return
        name = readable_name(source_of(node))
        if type(fake) is not type(example):  # then the trace has not seen what its class does
            raise UnsupportedInputError(
                f"{name} is a {type(example).__name__}, and its __tensor_unflatten__ makes a {type(fake).__name__}: "
                "let it make what it was called on"
            )
        recipe = checked_recipe(fake, name)
        parts = []
        for path in recipe.paths():
            copy = self._graph.placeholder("_".join([node.name, *map(_attribute, path)]))
            copy.meta = dict(node.meta)
            copy.meta["example_value"] = reach(fake, path)
            note_inner_tensor(copy, InnerTensor(example, _suffix(path)))
            self._inputs.append((copy, PlainInput(position, path)))
            parts.append(copy)
        self._env[node] = Wrapped(name, fake, recipe, tuple(parts), position=position)

    def _add_measures(self, wrapped: Wrapped) -> None:
        """Let the graph take the sizes of an input that nothing else which it takes tells.

        Dynamo looks at the outermost sizes of an input and at those of the tensors within. What it takes for a constant
        between them (a DTensor in another subclass) is noted, to be looked at in every call.
        """
        assert wrapped.position is not None, "it is an input"
        for path in (*wrapped.recipe.levels(), *wrapped.recipe.paths()):
            tensor = reach(wrapped.value, path)
            for measure, numbers in (("size", tensor.shape), ("stride", tensor.stride())):
                for dim, number in enumerate(numbers):
                    plain = PlainInput(wrapped.position, path, (measure, dim))
                    if path and is_wrapper_subclass(tensor) and not isinstance(number, torch.SymInt):
                        self._unguarded.append((plain, number))
                    self._add_measure(plain, number, f"{wrapped.name}{_suffix(path)}.{measure}()[{dim}]")

    def _add_measure(self, plain: PlainInput, number: Value, name: str) -> None:
        if not isinstance(number, torch.SymInt) or not expr_of(number).is_Symbol or expr_of(number) in self._symbols:
            return
        node = self._symbols[expr_of(number)] = self._graph.placeholder(f"measure_{len(self._inputs)}")
        node.meta["example_value"] = self._fakes[node] = number
        note_inner_tensor(node, InnerTensor(None, name))
        self._inputs.append((node, plain))

    def _numbers(self, sizes: Sequence[Value]) -> tuple[Any, ...]:
        return tuple(map(self._number, sizes))

    def _number(self, size: Value) -> Any:
        number = build_expr(expr_of(size), self._symbols, self._graph)
        if isinstance(number, fx.Node):
            number.meta.setdefault("example_value", size)
        return number

    def _add(self, node: fx.Node) -> None:
        if node.target in MODE_SWITCHES:
            self._switch(node)
        if self._is_plain(node):
            copy = self._env[node] = self._graph.node_copy(node, lambda arg: self._env[arg])
            if node.op == "get_attr":
                self._fakes[copy] = self._fake(operator.attrgetter(str(node.target))(self._gm))
        elif node.target is operator.getitem and isinstance(items := self._env[node.all_input_nodes[0]], (tuple, list)):
            index: Any = node.args[1]
            self._env[node] = items[index]
        else:
            self._replace(node)

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether no wrapper subclass takes part in a node."""
        if _has_subclass(node.meta.get("example_value")):
            return False
        args = [self._env[arg] for arg in node.all_input_nodes]
        bodies = [self._fakes[arg] for arg in args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
        return all(isinstance(arg, fx.Node) for arg in args) and not any(
            isinstance(body, fx.GraphModule) and _works_on_subclasses(body) for body in bodies
        )

    def _switch(self, node: fx.Node) -> None:
        """Switch a mode for what is traced from here on."""
        assert callable(node.target), "it is a function"
        self._open[node] = node.target(*[self._open[arg] if isinstance(arg, fx.Node) else arg for arg in node.args])

    def _fake(self, value: Value) -> Value:
        return self._mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value

    def _value(self, node: fx.Node) -> Value:
        """What a node of the new graph is in a trace."""
        if node not in self._fakes:
            value = node.meta.get("example_value")
            self._fakes[node] = pytree.tree_map_only(Tensor, lambda tensor: fake_of(self._mode, tensor), value)
        return self._fakes[node]

    def _replace(self, node: fx.Node) -> None:
        """Trace a node in plain tensors, and put what it does in its place."""
        call = PlainCall(self._gm, node, self._env, self._value)
        try:
            traced = trace_in_plain_tensors(call, call.values, self._mode)
        except Dsv4Error:
            raise
        except Exception as error:  # whatever the class, or torch, raises
            of = " and ".join(map(str, call.wrapped)) or "what it makes"
            raise UnsupportedInputError(
                f"{node.name} cannot be told in ops on the plain tensors of {of} ({where(node)}): "
                f"{type(error).__name__}: {error}. Give it plain tensors (`to_local` of a DTensor), or keep it outside "
                "of the model"
            ) from error
        op = random_op_in(traced)
        if op is not None and any(is_distributed(wrapped.value) for wrapped in call.wrapped):
            raise UnsupportedInputError(
                f"{node.name} draws random numbers for a DTensor with {op} ({where(node)}), from a state that this "
                "version of torch sets on the host before and after: draw them outside of the model"
            )
        self._env[node] = call.result(iter(self._splice(node, traced, call.operands)))

    def _splice(self, node: fx.Node, traced: fx.GraphModule, operands: Sequence[fx.Node]) -> list[Any]:
        """Copy a traced graph to the end of the new one; the nodes and constants that it returns."""
        env: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
        lines = {key: node.meta[key] for key in _KEPT if key in node.meta}
        no_autocast = [
            self._graph.call_function(ENTER_AUTOCAST, (kind, dtype, False, torch.is_autocast_cache_enabled()))
            for kind, is_enabled, dtype in autocast_state()
            if is_enabled
        ]
        for inner in traced.graph.nodes:
            if inner.op not in ("placeholder", "output"):
                env[inner] = self._copy(inner, env, traced)
                if isinstance(env[inner], fx.Node):
                    env[inner].meta |= lines
        for entered in reversed(no_autocast):
            self._graph.call_function(EXIT_AUTOCAST, (entered,))
        returned: Any = traced.graph.output_node().args[0]
        return list(fx.map_arg(returned, lambda arg: env[arg]))

    def _copy(self, inner: fx.Node, env: Mapping[fx.Node, Any], traced: fx.GraphModule) -> Any:
        """A node, or the number that it would compute of sizes which are inputs or constants."""
        value = inner.meta.get("val")
        if isinstance(value, torch.SymInt) and expr_of(value).free_symbols <= self._symbols.keys():
            return self._number(value)
        copy = self._graph.node_copy(inner, lambda arg: env[arg])
        copy.meta = {"example_value": value}
        if inner.op == "get_attr":
            value = operator.attrgetter(str(inner.target))(traced)
            copy.target = f"constant_of_trace_{len(self._constants)}"
            self._constants[copy.target] = value
            copy.meta["example_value"] = self._fake(value)
        return copy

    def _finish(self, node: fx.Node) -> tuple[Result, ...]:
        """Return what the results of a call are made of."""
        given: list[Any] = []
        made: dict[Wrapped, MadeResult] = {}

        def give(value: Any) -> int:
            given.append(value)
            return len(given) - 1

        def numbers(values: Sequence[Any]) -> Numbers:
            return tuple(PlainResult(give(value)) if isinstance(value, fx.Node) else value for value in values)

        def result(value: Tree) -> Result:
            if not isinstance(value, Wrapped):
                return PlainResult(give(value))
            if value.position is not None:
                return OwnArgument(value.position)
            if value not in made:
                layouts = tuple((numbers(size), numbers(stride)) for size, stride in value.layouts)
                made[value] = MadeResult(value.recipe, tuple(map(give, value.parts)), layouts)
            return made[value]

        returned: Any = fx.node.map_aggregate(
            node.args[0], lambda arg: self._env[arg] if isinstance(arg, fx.Node) else arg
        )
        results = tuple(map(result, returned))
        self._graph.output(tuple(given)).meta = dict(node.meta)
        return results

    def _drop_unused(self) -> None:
        """Arithmetic on sizes that nobody needs, and meshes and groups that only what was replaced has needed."""
        for node in reversed(self._graph.nodes):
            if not node.users and node.op == "call_function" and isinstance(node.meta.get("example_value"), _SYMBOLIC):
                self._graph.erase_node(node)
        for node, plain in list(self._inputs):
            if not node.users and not plain.path and is_opaque(self._fakes[node]):
                self._graph.erase_node(node)
                self._inputs.remove((node, plain))

    def _module(self) -> fx.GraphModule:
        targets = {str(node.target) for node in self._graph.nodes if node.op == "get_attr"} - self._constants.keys()
        own = {target: operator.attrgetter(target)(self._gm) for target in targets}
        gm = module_of({**own, **self._constants}, self._graph)
        gm.meta = dict(self._gm.meta)
        keep_break_reason(gm, self._gm)
        return gm


def random_op_in(traced: fx.GraphModule) -> str | None:
    """An op that draws random numbers on a device that is not the CPU, where DTensor moves the generator itself."""
    for node in traced.graph.nodes:
        value = node.meta.get("val")
        draws = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
        if draws and isinstance(value, Tensor) and not value.is_cpu:
            return op_name(node.target)
    return None


def _attribute(name: str) -> str:
    """An attribute as a person would say it: "_local_tensor" of a DTensor is "local"."""
    return name.strip("_").removesuffix("_tensor")


def _suffix(path: Sequence[str]) -> str:
    return "".join(f".{_attribute(name)}" for name in path)
