"""Levels of `torch.func` transforms and of forward-mode derivatives, and values that mean something at a level only.

Nothing here may import functorch at module level: `dsv4_compile` is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx
from torch.autograd import forward_ad

_MODULES = ("torch._functorch", "torch._C._functorch")
_ENTER, _LEAVE = "_increment_nesting", "_decrement_nesting"


def is_transform_node(node: fx.Node) -> bool:
    """Whether a node is part of a transform itself, not of what is transformed."""
    return (getattr(node.target, "__module__", None) or "").startswith(_MODULES)


def entered_level(node: fx.Node) -> str | None:
    """ "vmap", "grad", "jvp" or "func" of a node that enters a level; None for any other."""
    name = str(getattr(node.target, "__name__", ""))
    return name.removesuffix(_ENTER).strip("_") if is_transform_node(node) and name.endswith(_ENTER) else None


def leaves_level(node: fx.Node) -> bool:
    """Whether a node leaves a level."""
    return is_transform_node(node) and str(getattr(node.target, "__name__", "")).endswith(_LEAVE)


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
