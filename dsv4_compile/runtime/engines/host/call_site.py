"""The state in which an op was called, for its kernel where that is Python.

A dispatch mode is called below autocast, autograd and transforms, and so is what it calls. Without a mode, a kernel in
Python runs as the code around its call does: `x @ w` in it is cast under autocast, and `torch.vmap` and
`torch.autograd.grad` work. Function modes see a call before the dispatcher does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.overrides import TorchFunctionMode

from ....compat.dispatch import (
    DispatchKeySet,
    OpArgs,
    OpKwargs,
    OpOverload,
    Tree,
    excluded_keys,
    excluding_keys,
    has_autocast_kernel,
)
from ....graph.op_properties import OWN_NAMESPACES


class CallSite(TorchFunctionMode):
    """Notes the dispatcher's state at every call of a function."""

    def __init__(self) -> None:
        super().__init__()
        self._excluded: DispatchKeySet | None = None

    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> Tree:
        self._excluded = excluded_keys()
        return func(*args, **(kwargs or {}))

    def state_of(self, func: OpOverload) -> AbstractContextManager[object]:
        """The state for an op's kernel; torch's own kernels, and those behind a rule of autocast, run in this one."""
        if self._excluded is None or func.namespace in OWN_NAMESPACES or has_autocast_kernel(func):
            return nullcontext()
        return excluding_keys(self._excluded)
