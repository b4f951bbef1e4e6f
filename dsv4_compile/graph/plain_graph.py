"""A graph that takes and gives plain tensors, and how the arguments and results of a call become those.

Dynamo's graph may take and give wrapper subclasses of Tensor; `desugar` rewrites it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from ..compat.subclasses import Recipe, reach
from .traced import Value


@dataclass(frozen=True, slots=True)
class PlainInput:
    """What a graph takes of an argument of a call.

    Attributes:
        position: of the argument.
        path: attributes that lead to a tensor that it holds; none for the argument itself.
        measure: "size" or "stride" if the graph takes that of the tensor, and of which dim; None for the tensor.
    """

    position: int
    path: tuple[str, ...] = ()
    measure: tuple[str, int] | None = None

    def of(self, args: Sequence[Value]) -> Value:
        """What it is in a call."""
        value = reach(args[self.position], self.path) if self.path else args[self.position]
        return value if self.measure is None else getattr(value, self.measure[0])(self.measure[1])


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """Size and stride of a wrapper subclass among the arguments of a call, or within one.

    Attributes:
        position: of the argument.
        path: attributes that lead to it.
        size: what it was in the trace, as ints, and as SymInts which may have become constants since.
        stride: the same.
    """

    position: int
    path: tuple[str, ...]
    size: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]


@dataclass(frozen=True, slots=True)
class PlainResult:
    """A result of a call that the graph gives as it is."""

    index: int


@dataclass(frozen=True, slots=True)
class OwnArgument:
    """A result of a call that is the very argument."""

    position: int


Numbers: TypeAlias = tuple[int | PlainResult, ...]


@dataclass(frozen=True, slots=True)
class MadeResult:
    """A result of a call that is a wrapper subclass, made of what the graph gives.

    Attributes:
        recipe: how.
        tensors: what it holds, as indices of the graph's results.
        layouts: its size and stride, and those of what is within it.
    """

    recipe: Recipe
    tensors: tuple[int, ...]
    layouts: tuple[tuple[Numbers, Numbers], ...]


Result: TypeAlias = PlainResult | OwnArgument | MadeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainGraph:
    """A graph that takes and gives plain tensors.

    Attributes:
        gm: Dynamo's graph, or one that does the same on plain tensors.
        example_inputs: one real tensor or SymInt per placeholder of it.
        inputs: what it takes of the arguments of a call; None if it is Dynamo's.
        results: the results of a call, in order; a result that is returned twice is the same object here.
        unguarded: layouts of wrapper subclasses: where one is a constant, Dynamo does not look at it.
        original: Dynamo's graph, for a call in which one of them is another.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[Value]
    inputs: tuple[PlainInput, ...] | None = None
    results: tuple[Result, ...] = ()
    unguarded: tuple[WholeLayout, ...] = ()
    original: fx.GraphModule | None = None
