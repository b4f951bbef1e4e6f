"""What the recorder does with an op: the kinds of ops, told by schema, tags and where the CPU kernel comes from.

An op whose CPU kernel is made of other ops is never recorded itself. That holds for torch's composite ops (`linear`
and `reshape` arrive whole in inference mode, and the latter views or copies as it pleases) and for ops implemented
in Python, whose host code has to run once and not in every replay. Their kernels are entered as the dispatcher would:
`decompose` will not do, since it prefers Python decompositions, which round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial

import torch

from ....compat.dispatch import Argument, OpArgs, OpKwargs, OpOverload, Tree, bind_cpu_kernel, kernel_of
from ....graph.op_properties import ALLOCATIONS, UNDECLARED_VIEWS, aten_name

# Each with the place of its value among the arguments, or the value itself.
_FILLS: dict[str, tuple[int | None, int]] = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), (None, 0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), (None, 1)),
    "scalar_tensor": (0, 0),
    "full": (1, 0),
    "full_like": (1, 0),
    "new_full": (2, 0),
}
# Namespaces that only look at metadata, or at the clock.
_HOST_ONLY = ("prim", "profiler")
_OWN = ("aten", "prims")


class OpKind(Enum):
    """What recording an op means."""

    COMPOSITE = "torch makes its kernel of other ops: enter it, recording them"
    PYTHON = "its kernel is Python: run it, recording the ops that it calls"
    METADATA = "a view, or a question about sizes: run it, nothing is launched"
    METADATA_IN_PLACE = "changes sizes or strides of its argument: run it, if that tensor was made in the capture"
    CONSTANT = "a tensor made from Python numbers: its value is part of the graph"
    ALLOCATION = "new memory, no launch"
    FILL = "a new tensor of one value: record the filling"
    LAUNCH = "a kernel: record one launch"


def kind_of(func: OpOverload) -> OpKind:
    """The kind of an op; not cached, since a kernel may be registered later."""
    if func.namespace in _HOST_ONLY:
        return OpKind.METADATA
    body = _kind_of_body(func)
    if body is not None:
        return body
    if func is torch.ops.aten.lift_fresh.default:
        return OpKind.CONSTANT
    if func.namespace == "aten" and not func._schema.is_mutable:
        if func._opname in ALLOCATIONS:
            return OpKind.ALLOCATION
        if func._opname in _FILLS:
            return OpKind.FILL
    if torch.Tag.inplace_view in func.tags:
        return OpKind.METADATA_IN_PLACE
    if func.namespace == "aten" and (_is_view(func) or _returns_host_values(func)):
        return OpKind.METADATA
    return OpKind.LAUNCH


def why_kernel_is_refused(kind: OpKind, func: OpOverload) -> str | None:
    """What is wrong with a kernel that cannot be looked into, or is missing, or None."""
    if func.namespace in _OWN:
        is_missing = kind is OpKind.PYTHON and kernel_of(func)[0] is None
        return "has a kernel for other tensors than plain ones alone," if is_missing else None
    if kind is not OpKind.LAUNCH:
        return None
    if _is_view(func):
        return "returns a view and cannot be looked into, so it may not run while a graph is recorded"
    return "returns a value to the host" if _returns_host_values(func) else None


def bind_kernel(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Callable[[], object]:
    """The op's CPU kernel with its arguments bound, without the detour over autograd where possible."""
    for argument, value in argument_values(func, args, kwargs):
        if str(argument.type) == "Tensor" and isinstance(value, (bool, int, float, complex)):
            return partial(func, *args, **kwargs)
    return bind_cpu_kernel(func, args, kwargs)


def fill_value(func: OpOverload, args: OpArgs) -> Tree:
    """What a FILL op fills its result with."""
    place, value = _FILLS[func._opname]
    return value if place is None else args[place]


def is_opaque(func: OpOverload) -> bool:
    """Whether the kernel may touch memory that its arguments do not show."""
    return func.namespace not in _OWN


def argument_values(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Iterator[tuple[Argument, Tree]]:
    """The arguments that were given, each with its place in the schema."""
    yield from zip(func._schema.arguments, args, strict=False)
    by_name = {argument.name: argument for argument in func._schema.arguments}
    for name, value in kwargs.items():
        yield by_name[name], value


def has_argument(func: OpOverload, name: str) -> bool:
    """Whether the schema has an argument of this name."""
    return any(argument.name == name for argument in func._schema.arguments)


def _kind_of_body(func: OpOverload) -> OpKind | None:
    """COMPOSITE or PYTHON by the CPU kernel that the dispatcher takes, None for a kernel that cannot be entered."""
    key, is_python = kernel_of(func)
    if is_python or key is None:  # without a kernel, entering it raises what the dispatcher says about that
        return OpKind.PYTHON
    return OpKind.COMPOSITE if key == "CompositeImplicitAutograd" else None


def _is_view(func: OpOverload) -> bool:
    declared = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
    return declared or aten_name(func) in UNDECLARED_VIEWS


def _returns_host_values(func: OpOverload) -> bool:
    """It returns numbers, or nothing but them."""
    returns = func._schema.returns
    return bool(returns) and not any("Tensor" in str(value.type) for value in returns)
