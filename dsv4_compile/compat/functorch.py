"""Levels of `torch.func` transforms and of forward-mode derivatives, and values that mean something at a level only.

Nothing here may import functorch at module level: `dsv4_compile` is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

_MODULES = ("torch._functorch", "torch._C._functorch")
_ENTER, _LEAVE = "_increment_nesting", "_decrement_nesting"
# Of forward-mode derivatives, with or without a transform around; torch 2.11 to 2.14 have them in one of these.
_DUAL_MODULES = ("torch._functorch", "torch.autograd.forward_ad", "torch._C")
_ENTER_DUAL, _LEAVE_DUAL = "_enter_dual_level", "_exit_dual_level"


def is_transform_node(node: fx.Node) -> bool:
    """Whether a node is part of a transform itself, not of what is transformed."""
    return (getattr(node.target, "__module__", None) or "").startswith(_MODULES)


def entered_level(node: fx.Node) -> str | None:
    """ "vmap", "grad", "jvp", "func" or "dual_level" of a node that enters a level; None for any other."""
    if _is_dual(node, _ENTER_DUAL):
        return "dual_level"
    name = str(getattr(node.target, "__name__", ""))
    return name.removesuffix(_ENTER).strip("_") if is_transform_node(node) and name.endswith(_ENTER) else None


def leaves_level(node: fx.Node) -> bool:
    """Whether a node leaves a level."""
    name = str(getattr(node.target, "__name__", ""))
    return _is_dual(node, _LEAVE_DUAL) or (is_transform_node(node) and name.endswith(_LEAVE))


def _is_dual(node: fx.Node, name: str) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return getattr(node.target, "__name__", "") == name and module.startswith(_DUAL_MODULES)


def enters_dual_level(gm: fx.GraphModule) -> bool:
    """Whether a graph, or a body of it, enters a level of forward-mode derivatives."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(_is_dual(node, _ENTER_DUAL) for graph in graphs for node in graph.nodes)


def loads_rules(node: fx.Node) -> bool:
    """Whether a node makes sure that torch has registered its rules, which `load_rules` does once."""
    return is_transform_node(node) and getattr(node.target, "__name__", "") == "lazy_load_decompositions"


def load_rules() -> None:
    """Register torch's rules for transforms, which it does where one is first called."""
    from torch._functorch import vmap

    vmap.lazy_load_decompositions()  # type: ignore[attr-defined]


def is_wrapped(value: object) -> bool:
    """Whether a value belongs to a level, and means nothing outside of it."""
    from torch._C import _functorch

    return isinstance(value, Tensor) and bool(_functorch.is_functorch_wrapped_tensor(value))


def has_tangents() -> bool:
    """Whether tensors may carry tangents: a level of forward-mode derivatives is open. Dynamo has no guard for it."""
    return bool(forward_ad._current_level >= 0)


@dataclass(frozen=True, slots=True)
class Levels:
    """What is entered before a graph runs, so that an exception in it leaves nothing entered.

    Attributes:
        depth: how many levels of transforms.
        may_enter_dual: none of forward-mode derivatives, of which there is one in a process, and the graph enters it.
        forward_grad: whether forward-mode derivatives are taken at all.
    """

    depth: int
    may_enter_dual: bool
    forward_grad: bool

    @classmethod
    def before(cls, enters_dual: bool) -> Levels:
        """As it is now, before a graph runs that does or does not enter a level of forward-mode derivatives."""
        return cls(depth(), enters_dual and not has_tangents(), bool(torch._C._is_fwd_grad_enabled()))

    def put_back(self) -> None:
        """Leave what was entered since."""
        if self.may_enter_dual:
            with suppress(RuntimeError):  # torch tells in no other way that none is entered
                torch._C._exit_dual_level(level=0)
        leave_to(self.depth)
        torch._C._set_fwd_grad_enabled(self.forward_grad)


def depth() -> int:
    """How many levels this thread has entered."""
    from torch._C import _functorch

    return int(_functorch.get_dynamic_layer_stack_depth())


def leave_to(wanted: int) -> None:
    """Leave the levels that were entered beyond a depth.

    One by one: torch has a function for all of them, which in 2.11 leaves two where it should leave one.
    """
    from torch._C import _functorch

    kinds = _functorch.TransformType
    leave: dict[object, Callable[[], int]] = {
        kinds.Vmap: _functorch._vmap_decrement_nesting,
        kinds.Grad: _functorch._grad_decrement_nesting,
        kinds.Jvp: _functorch._jvp_decrement_nesting,
        kinds.Functionalize: _functorch._func_decrement_nesting,
    }
    while depth() > wanted:
        leave[_functorch.peek_interpreter_stack().key()]()
