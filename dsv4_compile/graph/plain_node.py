"""One node that wrapper subclasses take part in, as a function of plain tensors that can be traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.dispatch import Tree, pytree
from ..compat.subclasses import Layout, Recipe, is_wrapper_subclass, layouts_of, reach, recipe_of
from ..compat.symbols import expr_of
from ..errors import UnsupportedInputError
from .source_lines import where
from .traced import Value
from .wrapper_calls import calls_body, operands_of

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(eq=False, slots=True)
class Wrapped:
    """One wrapper subclass in a graph.

    Attributes:
        name: how the user reaches it, or what made it.
        value: a fake of it.
        recipe: how it is made.
        parts: nodes of the tensors that it holds.
        layouts: its size and stride, and those of what is within it, as numbers and nodes.
        position: of the argument that it is, if it is one.
    """

    name: str
    value: Tensor
    recipe: Recipe
    parts: tuple[fx.Node, ...]
    layouts: tuple[Layout, ...] = ()
    position: int | None = None

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of all that it is made of."""
        numbers = [n for size, stride in self.layouts for n in (*size, *stride) if isinstance(n, fx.Node)]
        return [*self.parts, *numbers]

    def __str__(self) -> str:
        return f"{self.name}, a {self.recipe.kind.__name__}"


def checked_recipe(value: Tensor, name: str) -> Recipe:
    """How a wrapper subclass is made.

    Raises:
        UnsupportedInputError: it cannot be taken apart.
    """
    try:
        return recipe_of(value)
    except Exception as error:  # whatever its class raises
        raise UnsupportedInputError(
            f"{name} is a {type(value).__name__}, which cannot be taken apart into plain tensors: {error}. Give its "
            "class a __tensor_flatten__ that names its tensors, or unwrap it and keep its user outside of the model"
        ) from error


class PlainCall:
    """Calls a node with wrapper subclasses made of plain tensors, and takes its results apart.

    Args:
        gm: the graph that the node is of.
        node: a node of it.
        env: what its arguments are: nodes of another graph, `Wrapped`s of such nodes, constants, containers of these.
        value_of: what such a node is in a trace.

    Attributes:
        operands: the nodes that it is a function of.
        values: what they are in a trace.
        wrapped: the wrapper subclasses that it takes.
    """

    def __init__(
        self, gm: fx.GraphModule, node: fx.Node, env: Mapping[fx.Node, Tree], value_of: Callable[[fx.Node], Value]
    ) -> None:
        self._gm, self._node, self._env = gm, node, env
        leaves = [leaf for arg in node.all_input_nodes for leaf in pytree.tree_leaves(env[arg])]
        self.wrapped = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Wrapped)))
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        nodes += [part for wrapped in self.wrapped for part in wrapped.nodes]
        values = {leaf: value_of(leaf) for leaf in nodes}
        self._constants = {leaf: v for leaf, v in values.items() if not isinstance(v, (Tensor, *_SYMBOLIC))}
        self.operands = [leaf for leaf in values if leaf not in self._constants]
        self.values = [values[leaf] for leaf in self.operands]
        self._result: Tree = None  # of the last call: a `Wrapped` that it took, or what stands for what it returned

    def __call__(self, *values: Value) -> list[Value]:
        """Call it; the plain tensors and numbers that its results are made of."""
        given = {**self._constants, **dict(zip(self.operands, values, strict=True))}
        made = {wrapped: self._make(wrapped, given) for wrapped in self.wrapped}

        def present(leaf: Tree) -> Value:
            if isinstance(leaf, Wrapped):
                return made[leaf]
            return given[leaf] if isinstance(leaf, fx.Node) else leaf

        def substitute(arg: Any) -> Value:
            return pytree.tree_map(present, self._env[arg]) if isinstance(arg, fx.Node) else arg

        args, kwargs = fx.node.map_aggregate((self._node.args, self._node.kwargs), substitute)
        result = self._run(args, dict(kwargs))
        for wrapped, tensor in made.items():
            self._check_unchanged(wrapped, tensor, given)
        returned: list[Value] = []
        owners = {id(tensor): wrapped for wrapped, tensor in made.items()}
        self._result = pytree.tree_map(lambda leaf: owners.get(id(leaf)) or _take_apart(leaf, returned), result)
        return returned

    def _run(self, args: Sequence[Value], kwargs: dict[str, Value]) -> Value:
        if self._node.op == "call_method":
            return getattr(args[0], str(self._node.target))(*args[1:], **kwargs)
        if self._node.op == "get_attr":
            return attrgetter(str(self._node.target))(self._gm)
        if calls_body(self._node) and isinstance(args[0], fx.GraphModule):
            return fx.Interpreter(args[0]).run(*operands_of(self._node, args))
        assert callable(self._node.target), "Dynamo calls no modules"
        return self._node.target(*args, **kwargs)

    def _make(self, wrapped: Wrapped, given: Mapping[fx.Node, Value]) -> Tensor:
        def present(numbers: Sequence[Any]) -> tuple[Value, ...]:
            return tuple(given[number] if isinstance(number, fx.Node) else number for number in numbers)

        layouts = [(present(size), present(stride)) for size, stride in wrapped.layouts]
        return wrapped.recipe.make(iter([given[part] for part in wrapped.parts]), iter(layouts))

    def _check_unchanged(self, wrapped: Wrapped, tensor: Tensor, given: Mapping[fx.Node, Value]) -> None:
        """What a node writes, it has to write to the tensors that its argument holds; nothing else would be seen."""
        holds = [reach(tensor, path) for path in wrapped.recipe.paths()]
        same = all(one is given[part] for one, part in zip(holds, wrapped.parts, strict=True))
        if not same or _description(tensor) != _description(wrapped.value):
            raise UnsupportedInputError(
                f"{self._node.name} gives {wrapped} other memory, sizes or placements in place ({where(self._node)}), "
                "which no replay repeats: let it return a new tensor"
            )

    def result(self, nodes: Iterator[Any]) -> Tree:
        """The results of the last call, given the nodes of what it returned."""
        return pytree.tree_map(lambda leaf: self._given(leaf, nodes), self._result)

    def _given(self, leaf: object, nodes: Iterator[Any]) -> Any:
        if isinstance(leaf, _Constant):
            return leaf.value
        if not isinstance(leaf, _Made):
            return leaf if isinstance(leaf, Wrapped) else next(nodes)
        parts = tuple(next(nodes) for _ in leaf.recipe.paths())
        layouts = tuple(
            (tuple(next(nodes) for _ in size), tuple(next(nodes) for _ in stride))
            for size, stride in layouts_of(leaf.value, leaf.recipe)
        )
        return Wrapped(self._node.name, leaf.value, leaf.recipe, parts, layouts)


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands for a wrapper subclass that a node returned."""

    value: Tensor
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class _Constant:
    """Stands for what a node returned and no graph computes."""

    value: object


class _Plain:
    """Stands for a plain tensor, or a number, that a node returned."""


def _take_apart(value: Value, returned: list[Value]) -> object:
    """Add what a result is made of to what is returned."""
    if is_wrapper_subclass(value):
        recipe = checked_recipe(value, "a result")
        returned.extend(reach(value, path) for path in recipe.paths())
        returned.extend(n for size, stride in layouts_of(value, recipe) for n in (*size, *stride))
        return _Made(value, recipe)
    if not isinstance(value, (Tensor, *_SYMBOLIC)):
        return _Constant(value)
    returned.append(value)
    return _Plain()


def _description(tensor: Tensor) -> list[object]:
    """What tells one wrapper subclass from another with the same tensors; of sizes, their expressions."""
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    leaves = [*tensor.shape, *pytree.tree_leaves(context)]
    return [expr_of(leaf) if isinstance(leaf, torch.SymInt) else leaf for leaf in leaves]
