"""Ops and the dispatcher: names, schemas, overloads, kernels, modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._C import Argument as Argument
from torch._C import DispatchKey
from torch._C import DispatchKeySet as DispatchKeySet
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Tensors, numbers, None, in lists, tuples and dictionaries: what ops take and give, and what `pytree` walks.
Tree: TypeAlias = Any
OpArgs: TypeAlias = tuple[Tree, ...]
OpKwargs: TypeAlias = dict[str, Tree]
Op: TypeAlias = OpOverload | HigherOrderOperator  # what a dispatch mode is shown


pytree = _pytree


# Functions whose ops look at their arguments on the host, if these are on a CPU, where no fake shows it.
READERS_ON_CPU = frozenset(
    [torch._C._nn.one_hot, torch.ops.aten.one_hot.default, torch.istft, torch.ops.aten.istft.default, "istft"]
)


# Python functions and tensor attributes do not call function modes inside.
NoFunctionModes = torch._C.DisableTorchFunction


# Where the public function of an aten op is, if there is one; `torch.nn.functional` calls those of the second.
PUBLIC_HOMES = (torch, torch._C._nn)


_CPU = DispatchKeySet(DispatchKey.CPU)


# Where the dispatcher looks for the CPU kernel of an op, in this order.
_KERNEL_KEYS = (
    "CPU",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
)


def all_op_names() -> list[str]:
    """Every op torch knows, as "ns::op" or "ns::op.overload"."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def schemas_of(name: str) -> list[torch._C.FunctionSchema]:
    """The schemas of all overloads of "ns::op", or of the one overload "ns::op.overload"; empty if unknown."""
    packet, _, overload = name.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(packet)
    if not overload:
        return list(schemas)
    wanted = "" if overload == "default" else overload
    return [schema for schema in schemas if schema.overload_name == wanted]


def has_composite_kernel(name: str) -> bool:
    """Whether torch takes "ns::op", or the overload "ns::op.overload", apart before dispatch modes see it."""
    packet = name.partition(".")[0]
    overloads = [f"{packet}.{schema.overload_name}".removesuffix(".") for schema in schemas_of(name)]
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op, "CompositeImplicitAutograd") for op in overloads)


def resolve_overload(target: Any, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> OpOverload:
    """The `OpOverload` that calling an op packet, an overload or a `custom_op` object with these values reaches."""
    op: OpOverload | OpOverloadPacket = getattr(target, "_opoverload", target)
    if not isinstance(op, OpOverloadPacket):
        return op
    names = op.overloads()
    name = names[0] if len(names) == 1 else torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs)
    overload: OpOverload = getattr(op, name)
    return overload


def op_name(overload: OpOverload) -> str:
    """ "ns::op.overload" of an `OpOverload`, with ".default" spelled out."""
    return f"{overload.namespace}::{overload._opname}.{overload._overloadname}"


def wrapped_op(node: fx.Node) -> Any:
    """The op that a functionalised call (`auto_functionalized` and its second version) stands for, or None."""
    name = getattr(node.target, "_name", "")
    return node.args[0] if node.op == "call_function" and str(name).startswith("auto_functionalized") else None


def python_kernels() -> AbstractContextManager[None]:
    """Composite ops run in their Python form, where they have one; so Dynamo and AOTAutograd run them on fakes."""
    from torch._dispatch.python import enable_python_dispatcher

    context: AbstractContextManager[None] = enable_python_dispatcher()
    return context


def has_address(tensor: torch.Tensor) -> bool:
    """Whether its memory can be found; that of a tensor which stands for another one, or for zeros, cannot."""
    return not (torch._is_functional_tensor(tensor) or tensor._is_zerotensor())


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie at one address."""
    return torch._debug_has_internal_overlap(tensor) != 0


def kernel_of(func: OpOverload) -> tuple[str | None, bool]:
    """The dispatch key that an op's CPU kernel is registered for, None without one, and whether it is Python."""
    name = func.name()
    for key in _KERNEL_KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            # torch.library keeps a note of every kernel that Python registered
            return key, f"{name.replace('::', '/')}/{key}" in torch.library._impls
    return None, False


def has_autocast_kernel(func: OpOverload) -> bool:
    """Whether autocast on a CPU does something of its own for an op, such as casting its arguments before it."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCPU"))


def excluded_keys() -> DispatchKeySet:
    """What the dispatcher passes over in this thread: autocast where it is off, autograd in inference mode, ..."""
    return torch._C._dispatch_tls_local_exclude_set()


def excluding_keys(keys: DispatchKeySet) -> AbstractContextManager[object]:
    """Let the dispatcher pass over these, and over nothing else."""
    guard: AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), keys
    )
    return guard


def bind_cpu_kernel(func: OpOverload, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Callable[[], Tree]:
    """An op's CPU kernel with its arguments bound, past autograd and modes; no numbers where it wants tensors."""
    return partial(func._handle.redispatch_boxed, _CPU, *args, **kwargs)


def call_composite_kernel(func: OpOverload, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Tree:
    """Call the kernel of a composite op, numbers for tensors allowed; a function mode on top would call the op."""
    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def with_lazy_bits_of(tensor: Tensor, alias: Tensor) -> Tensor:
    """`alias`, conjugated and negated lazily if `tensor` is."""
    return with_lazy_bits(alias, conj=tensor.is_conj(), neg=tensor.is_neg())


def with_lazy_bits(tensor: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """A tensor, conjugated and negated lazily."""
    tensor = tensor.conj() if conj else tensor
    return negated_view(tensor) if neg else tensor


# Negates lazily, as the imaginary part of what is conjugated lazily does.
negated_view = torch._neg_view
