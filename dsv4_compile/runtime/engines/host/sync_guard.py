"""What a captured graph refuses because a captured graph cannot follow it, and where the user wrote that.

A graph has no host in it, so no value can come back to Python, and no size can depend on data. Most of that passes
through the dispatcher. `tolist`, `numpy` and a few more read memory without it, so they are caught where Python calls
them. `Tensor.cpu()` is no copy on a CPU and is let through: what would read its result is not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from ....compat.dispatch import OpArgs, OpKwargs, OpOverload, Tree
from ....errors import CaptureError
from ....graph.op_properties import bind_arguments, cudagraph_unsafe_reason
from ..user_line import current_line
from .call_site import CallSite
from .tree import leaves_of

_SYNCS = "needs a device-to-host sync"
_METHODS = {
    Tensor.tolist: _SYNCS,
    Tensor.numpy: _SYNCS,
    Tensor.__array__: _SYNCS,
    Tensor.__dlpack__: _SYNCS,  # NumPy takes what it gives for memory that holds data already
    Tensor.__float__: _SYNCS,
    Tensor.__int__: _SYNCS,
    Tensor.__index__: _SYNCS,
    Tensor.__complex__: _SYNCS,
    Tensor.__reduce_ex__: _SYNCS,
    Tensor.apply_: "runs Python on every element",
    Tensor.map_: "runs Python on every element",
    Tensor.map2_: "runs Python on every element",
    Tensor.data.__set__: "moves a tensor, which no replay repeats",  # type: ignore[attr-defined]
}
# Made of other ops, and reading its second argument itself where that is a tensor.
_SPLITS = (torch.tensor_split, Tensor.tensor_split)
# They copy elements of their argument without the dispatcher, where those are tensors in a list.
_CONSTRUCTORS = frozenset([torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new])


def why_refused(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> str | None:
    """Why a graph cannot hold an op called with these values, or None."""
    return cudagraph_unsafe_reason(func, bind_arguments(func, args, kwargs))


class HostReadGuard(CallSite):
    """Refuses the functions that go around the dispatcher."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.failure: CaptureError | None = None

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        # an interrupt may have come while torch had popped it for a moment; whoever serves the call sees to the stack
        with suppress(RuntimeError) if kind is not None else nullcontext():
            super().__exit__(kind, error, traceback)

    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> Tree:
        reason = _METHODS.get(func)
        if func in _CONSTRUCTORS and any(_holds_tensor(value) for value in args):
            reason = "copies elements out of tensors on the host"
        if func in _SPLITS and any(isinstance(value, Tensor) for value in [*args[1:], *(kwargs or {}).values()]):
            reason = _SYNCS
        if reason is not None:
            self.failure = refusal(_function_name(func), reason, self._name)
            raise self.failure
        return super().__torch_function__(func, types, args, kwargs)


def refusal(what: str, reason: str, name: str) -> CaptureError:
    """The error for an op or function, to be raised while user code is on the stack."""
    line = current_line()
    error = CaptureError(
        f"{what} {reason} while {name} is recorded ({line}). A graph cannot hold that: compute it on the "
        "device, or register the op that does it as a split op, so that it runs eagerly."
    )
    error.reason, error.line = f"{what} {reason}".rstrip(","), line
    return error


def _holds_tensor(value: object) -> bool:
    """Whether a list holds tensors; a tensor itself is copied by an op, which is recorded."""
    return isinstance(value, (list, tuple)) and any(isinstance(leaf, Tensor) for leaf in leaves_of(value))


def _function_name(func: object) -> str:
    name = str(getattr(func, "__qualname__", func))
    return name.replace("TensorBase", "Tensor").replace("_VariableFunctionsClass", "torch")
