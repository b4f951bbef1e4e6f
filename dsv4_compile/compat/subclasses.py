"""Wrapper subclasses of Tensor (DTensor, quantised weights): what one holds, and how it is made again of that.

Torch asks two methods of such a class: `__tensor_flatten__` names the attributes that hold its tensors, and what else
belongs to it; `__tensor_unflatten__` makes one of other tensors. Some hold what is no tensor among these attributes (a
device mesh), which torch wraps while it traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .dispatch import python_kernels

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

# Size and stride of a tensor, as ints or SymInts.
Layout = tuple[Sequence[Any], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a wrapper subclass is made of plain tensors.

    Attributes:
        kind: its class.
        inner: its attributes that hold tensors, with the recipe of each that is a wrapper subclass too.
        others: its attributes that hold something else, and what.
        context: what else `__tensor_flatten__` gave.
    """

    kind: type
    inner: tuple[tuple[str, Recipe | None], ...]
    others: tuple[tuple[str, object], ...]
    context: object

    def paths(self) -> Iterator[tuple[str, ...]]:
        """How each plain tensor is reached, as names of attributes."""
        for name, recipe in self.inner:
            if recipe is None:
                yield (name,)
            else:
                yield from ((name, *path) for path in recipe.paths())

    def levels(self) -> Iterator[tuple[str, ...]]:
        """How each wrapper subclass is reached, itself first, in the order of `layouts_of`."""
        yield ()
        for name, recipe in self.inner:
            if recipe is not None:
                yield from ((name, *path) for path in recipe.levels())

    def make(self, tensors: Iterator[Tensor], layouts: Iterator[Layout]) -> Tensor:
        """A tensor of this class.

        Args:
            tensors: in the order of `paths`.
            layouts: sizes and strides in the order of `levels`.

        Raises:
            TypeError: what its class makes is of another class.
        """
        size, stride = next(layouts)
        held: dict[str, object] = dict(self.others)
        for name, recipe in self.inner:
            held[name] = next(tensors) if recipe is None else recipe.make(tensors, layouts)
        unflatten: Callable[..., Tensor] = getattr(self.kind, "__tensor_unflatten__")  # noqa: B009
        made = unflatten(held, self.context, torch.Size(size), tuple(stride))
        if type(made) is not self.kind:
            raise TypeError(f"its __tensor_unflatten__ makes a {type(made).__name__}")
        return made


def is_wrapper_subclass(value: object) -> bool:
    """Whether a value is a tensor of a class that holds other tensors, and says which."""
    return bool(is_traceable_wrapper_subclass(value))


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def recipe_of(tensor: Tensor) -> Recipe:
    """How a wrapper subclass is made.

    Raises:
        TypeError: an attribute that it names holds neither a tensor nor an object that torch treats as a constant.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: list[tuple[str, Recipe | None]] = []
    others: list[tuple[str, object]] = []
    for name in names:
        value = real_object(getattr(tensor, name))
        if isinstance(value, Tensor):
            inner.append((name, recipe_of(value) if is_wrapper_subclass(value) else None))
        elif is_opaque(value):
            others.append((name, value))
        else:
            raise TypeError(f"its attribute {name} holds a {type(value).__name__}, which is no tensor")
    return Recipe(type(tensor), tuple(inner), tuple(others), context)


def reach(tensor: Tensor, path: Sequence[str]) -> Tensor:
    """What is held by a tensor at the end of a path of attributes."""
    for name in path:
        tensor = getattr(tensor, name)
    return tensor


def layouts_of(tensor: Tensor, recipe: Recipe) -> Iterator[Layout]:
    """Sizes and strides of a wrapper subclass, and of those within it."""
    yield tuple(tensor.shape), tuple(tensor.stride())
    for name, inner in recipe.inner:
        if inner is not None:
            yield from layouts_of(getattr(tensor, name), inner)


def is_opaque(value: object) -> bool:
    """Whether an object that is no tensor may be an input of a graph (a device mesh, a process group)."""
    try:
        from torch._library.opaque_object import is_opaque_type
    except ImportError:  # torch 2.11 knows of fewer of them, and hands none to a backend
        return False
    return bool(is_opaque_type(type(real_object(value))))


def real_object(value: Any) -> Any:
    """The object itself, where torch has wrapped one for its trace."""
    from torch._library.fake_class_registry import FakeScriptObject

    return value.real_obj if isinstance(value, FakeScriptObject) else value


class Trace:
    """The graph that is being made of what a function dispatches; only while `trace_in_plain_tensors` calls it."""

    def __init__(self) -> None:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode = get_proxy_mode()
        assert mode is not None, "nothing is traced"
        self._tracer: Any = mode.tracer

    @property
    def root(self) -> torch.nn.Module:
        """Where the graph finds its constants."""
        root: torch.nn.Module = self._tracer.root
        return root

    def operand_of(self, value: Any) -> Any:
        """What stands for a tensor or a number among the arguments of a node; the value itself for anything else."""
        return self._tracer.unwrap_proxy(value)

    def add(self, node: fx.Node, args: Any, kwargs: Any, target: Any, value: Any) -> Any:
        """Add a node that is like another one, and let a value be its result; returns what stands for it."""
        from torch.fx.experimental.proxy_tensor import track_tensor_tree

        proxy = self._tracer.create_proxy(node.op, target, args, kwargs, name=node.name)
        track_tensor_tree(value, proxy, constant=None, tracer=self._tracer)
        return proxy

    def call(self, function: Callable[..., object], *args: object) -> Any:
        """Add a call of a function that no dispatch would show; returns what stands for its result."""
        return self._tracer.create_proxy("call_function", function, args, {})

    def last(self) -> fx.Node:
        """The node that was added last."""
        node: fx.Node = next(iter(reversed(self._tracer.graph.nodes)))
        return node


def trace_in_plain_tensors(
    function: Callable[..., object], values: Sequence[Any], mode: FakeTensorMode
) -> fx.GraphModule:
    """The ops that a function dispatches on tensors which are no wrapper subclasses, as a graph.

    Args:
        function: takes `values`; may make wrapper subclasses of them, and returns what is none.
        values: fake tensors and SymInts.
        mode: theirs.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, python_kernels():
        return make_fx(function)(*values)
