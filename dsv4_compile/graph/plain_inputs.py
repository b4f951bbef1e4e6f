"""The inputs of a graph on plain tensors: what each is of the arguments of a call, and what it is in a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx

from ..compat.dispatch import pytree
from ..compat.dynamo import InnerTensor, note_inner_tensor, source_of
from ..compat.subclasses import Recipe, is_wrapper_subclass, layouts_of, reach, real_object, recipe_of
from ..compat.symbols import expr_of, is_ragged
from ..errors import UnsupportedInputError
from .plain_graph import PlainInput, WholeLayout
from .traced import Value
from .tracing import readable_name

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


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


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A wrapper subclass among the inputs, as it is in a trace.

    Attributes:
        name: how the user reaches it.
        tensor: made of what stands for the tensors that it holds.
        parts: those.
        position: of the argument that it is.
        description: what it was, sizes and all.
    """

    name: str
    tensor: Tensor
    parts: tuple[Tensor, ...]
    position: int
    description: list[object]

    def check_unchanged(self) -> None:
        """What is written to it has to be written to the tensors that it holds; nothing else would be seen.

        Raises:
            UnsupportedInputError: it holds other tensors, or has other sizes or placements, than before.
        """
        holds = [reach(self.tensor, path) for path in recipe_of(self.tensor).paths()]
        same = len(holds) == len(self.parts) and all(map(_is, holds, self.parts))
        if not same or describe(self.tensor) != self.description:
            raise UnsupportedInputError(
                f"{self.name}, a {type(self.tensor).__name__}, is given other memory, sizes or placements in place, "
                "which no replay repeats: return a new tensor, or write to the one that it holds"
            )


def _is(one: object, other: object) -> bool:
    return one is other


def describe(tensor: Tensor) -> list[object]:
    """What tells one wrapper subclass from another with the same tensors; of sizes, their expressions."""
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    leaves = [*tensor.shape, *pytree.tree_leaves(context)]
    return [expr_of(leaf) if isinstance(leaf, torch.SymInt) else leaf for leaf in leaves]


class InnerInputs:
    """What a graph takes instead of Dynamo's inputs.

    Args:
        placeholders: of Dynamo's graph.
        example_inputs: a real tensor or SymInt for each.
        fakes: the same in a trace.

    Attributes:
        plain: what it takes, in order.
        names: of the nodes for them.
        values: what they are in a trace.
        symbols: the index among them of each size symbol.
        unguarded: layouts of the wrapper subclasses.
    """

    def __init__(
        self, placeholders: Sequence[fx.Node], example_inputs: Sequence[Value], fakes: Sequence[Value]
    ) -> None:
        self.plain: list[PlainInput] = []
        self.names: list[str] = []
        self.values: list[Value] = []
        self.symbols: dict[sympy.Symbol, int] = {}
        self.unguarded: list[WholeLayout] = []
        self._placeholders = list(placeholders)
        self._notes: list[InnerTensor | None] = []
        self._fakes = [real_object(fake) for fake in fakes]
        self._recipes: dict[int, Recipe] = {}
        for position, (node, example) in enumerate(zip(placeholders, example_inputs, strict=True)):
            self._add(position, node, example)
        for position in self._recipes:
            self._add_measures(position)

    def _add(self, position: int, node: fx.Node, example: Value) -> None:
        fake = self._fakes[position]
        if is_wrapper_subclass(fake):
            recipe = self._recipes[position] = self._checked(node, example, fake)
            for path in recipe.paths():
                name = "_".join([node.name, *map(_attribute, path)])
                self._take(PlainInput(position, path), name, reach(fake, path), InnerTensor(example, _suffix(path)))
        elif isinstance(fake, (Tensor, *_SYMBOLIC)):  # else it is a mesh or a group, and a constant of the graph
            self._take(PlainInput(position), node.name, fake, None)

    def _checked(self, node: fx.Node, example: Tensor, fake: Tensor) -> Recipe:
        name = readable_name(source_of(node))
        if type(fake) is not type(example):  # then the trace does not see what its class does
            raise UnsupportedInputError(
                f"{name} is a {type(example).__name__}, and its __tensor_unflatten__ makes a {type(fake).__name__}: "
                "let it make what it was called on"
            )
        if any(map(is_ragged, fake.shape)):
            raise UnsupportedInputError(
                f"{name} is a nested tensor with a ragged size, which is no number and part of no bucket: pass its "
                "values() and offsets(), and make it inside of the model (torch.nested.nested_tensor_from_jagged)"
            )
        return checked_recipe(fake, name)

    def _take(self, plain: PlainInput, name: str, value: Value, note: InnerTensor | None) -> None:
        if isinstance(value, torch.SymInt) and expr_of(value).is_Symbol:
            self.symbols.setdefault(expr_of(value), len(self.plain))
        self.plain.append(plain)
        self.names.append(name)
        self.values.append(value)
        self._notes.append(note)

    def _add_measures(self, position: int) -> None:
        """Take the sizes of a wrapper subclass that nothing else which is taken tells.

        Dynamo looks at the sizes of the tensors within, and at symbols. What it takes for a constant of the wrapper, or
        what becomes one in a trace, it does not look at, since it looks at constants with the whole tensor elsewhere:
        two rows over two ranks, and three, are one row on the second. So layouts are noted, to be looked at in every
        call.
        """
        fake, recipe = self._fakes[position], self._recipes[position]
        name = readable_name(source_of(self._placeholders[position]))
        for path in (*recipe.levels(), *recipe.paths()):
            tensor = reach(fake, path)
            if is_wrapper_subclass(tensor):
                self.unguarded.append(WholeLayout(position, path, tuple(tensor.shape), tuple(tensor.stride())))
            for measure, numbers in (("size", tensor.shape), ("stride", tensor.stride())):
                for dim, number in enumerate(numbers):
                    if not isinstance(number, torch.SymInt):
                        continue
                    if expr_of(number).is_Symbol and expr_of(number) not in self.symbols:
                        note = InnerTensor(None, f"{name}{_suffix(path)}.{measure}()[{dim}]")
                        self._take(
                            PlainInput(position, path, (measure, dim)), f"{measure}_{len(self.plain)}", number, note
                        )

    def bind(self, values: Sequence[Value], env: dict[fx.Node, Value]) -> list[Wrapped]:
        """Let Dynamo's placeholders be what they are in a trace, where `values` stand for what the graph takes."""
        given = {
            (plain.position, plain.path): v for plain, v in zip(self.plain, values, strict=True) if not plain.measure
        }
        found = []
        for position, node in enumerate(self._placeholders):
            recipe = self._recipes.get(position)
            if recipe is None:
                env[node] = given.get((position, ()), self._fakes[position])
                continue
            parts = tuple(given[position, path] for path in recipe.paths())
            tensor = env[node] = recipe.make(iter(parts), layouts_of(self._fakes[position], recipe))
            name = readable_name(source_of(node))
            found.append(Wrapped(name, tensor, parts, position, describe(tensor)))
        return found

    def describe_placeholder(self, index: int, node: fx.Node) -> None:
        """Give a placeholder of the new graph what is known of Dynamo's."""
        plain, note = self.plain[index], self._notes[index]
        if plain.measure is None:
            node.meta = dict(self._placeholders[plain.position].meta)
        if note is not None:
            note_inner_tensor(node, note)
        if plain.path or plain.measure:
            node.meta["example_value"] = self.values[index]

    def examples(self, example_inputs: Sequence[Value]) -> Iterator[Value]:
        """One real tensor or SymInt for each of what is taken."""
        for plain, value in zip(self.plain, self.values, strict=True):
            yield value if plain.measure else plain.of(example_inputs)

    def told(self, node: fx.Node) -> str:
        """The wrapper subclasses among the inputs that a node takes, for an error."""
        positions = [position for position, given in enumerate(self._placeholders) if given in node.all_input_nodes]
        names = [
            f"{readable_name(source_of(self._placeholders[position]))} is a {type(self._fakes[position]).__name__}, "
            for position in positions
            if position in self._recipes
        ]
        return "".join(names)


def _attribute(name: str) -> str:
    """An attribute as a person would say it: "_local_tensor" of a DTensor is "local"."""
    return name.strip("_").removesuffix("_tensor")


def _suffix(path: Sequence[str]) -> str:
    return "".join(f".{_attribute(name)}" for name in path)
