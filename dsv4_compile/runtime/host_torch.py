"""The private torch names that the host engine relies on, beyond those of `compat` (torch 2.11 to 2.14)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

# Python functions and tensor attributes do not call function modes inside.
NoFunctionModes = torch._C.DisableTorchFunction
# Calls of torch do not reach the dispatch modes of this thread inside.
no_dispatch_modes = _disable_current_modes
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


def kernel_of(func: OpOverload) -> tuple[str | None, bool]:
    """The dispatch key that an op's CPU kernel is registered for, None without one, and whether it is Python."""
    name = func.name()
    for key in _KERNEL_KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            # torch.library keeps a note of every kernel that Python registered
            return key, f"{name.replace('::', '/')}/{key}" in torch.library._impls
    return None, False


def bind_cpu_kernel(func: OpOverload, args: Any, kwargs: Any) -> Callable[[], Any]:
    """An op's CPU kernel with its arguments bound, past autograd and modes; no numbers where it wants tensors."""
    return partial(func._handle.redispatch_boxed, _CPU, *args, **kwargs)


def call_composite_kernel(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Call the kernel of a composite op, numbers for tensors allowed; a function mode on top would call the op."""
    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def with_lazy_bits_of(tensor: Tensor, alias: Tensor) -> Tensor:
    """`alias`, conjugated and negated lazily if `tensor` is."""
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias
