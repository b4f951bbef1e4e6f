"""One recorded kernel, and how it becomes a call without arguments.

The call that is fastest to make is the public function with its arguments bound: `partial(torch.mm, a, b, out=c)`
takes about half the time of the op `aten::mm.out` itself. A public function picks an overload by itself, so it is only
taken once a dry run has shown that both calls reach the dispatcher alike.

Everything else is bound to the op's CPU kernel below autocast and autograd, whose work was recorded already: replaying
`mm` through autocast would cast a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from .host_ops import bind_kernel, is_opaque
from .host_pool import Block, Lease
from .host_twins import TENSOR_OPTIONS, out_names, out_twin
from .host_values import leaves_of, map_leaves


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor that a launch reads or writes: an alias, so that it stays what it was when it was recorded.

    Attributes:
        tensor: the alias.
        block: the pool block that the memory is in, None for memory of the caller.
        lease: the block's lease when this was recorded.
    """

    tensor: Tensor
    block: Block | None = None
    lease: Lease | None = None

    def overlaps(self, other: Operand) -> bool:
        """Whether the address ranges of both meet."""
        (start, end), (other_start, other_end) = span(self.tensor), span(other.tensor)
        return start < other_end and other_start < end


@dataclass(eq=False, slots=True)
class Launch:
    """A kernel with its arguments.

    Attributes:
        func: the op.
        args: as it was called, with an `Operand` in place of each tensor.
        kwargs: likewise.
        returns: what it returned, flat; None where that is an argument, no tensor, or not wanted.
        operands: everything that it touches.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returns: tuple[Operand | None, ...] = ()
    operands: list[Operand] = field(init=False)

    def __post_init__(self) -> None:
        leaves = leaves_of((self.args, self.kwargs))
        self.operands = [leaf for leaf in leaves if isinstance(leaf, Operand)] + self.results

    def drop_result(self, operand: Operand) -> None:
        """Leave one result out, so that the kernel's is not copied to it."""
        self.returns = tuple(None if kept is operand else kept for kept in self.returns)
        self.operands.remove(operand)

    @property
    def results(self) -> list[Operand]:
        """The tensors that the launch makes."""
        return [operand for operand in self.returns if operand is not None]

    @property
    def is_copy(self) -> bool:
        """Whether it copies its second argument to its first, which is its result if it is new."""
        return self.func is torch.ops.aten.copy_.default

    @property
    def opaque(self) -> bool:
        """Whether it may touch memory that its operands do not show."""
        return is_opaque(self.func)

    def bind(self) -> Callable[[], Any]:
        """A call without arguments that runs the kernel and leaves its results in `results`."""
        args, kwargs = map_leaves(lambda operand: operand.tensor, Operand, (self.args, self.kwargs))
        results = [operand.tensor for operand in self.results]
        if not results or self.is_copy:
            return bind_fastest(self.func, args, kwargs)
        twin = out_twin(self.func)
        if twin is None:
            targets = [None if operand is None else operand.tensor for operand in self.returns]
            return partial(_run_and_copy, self.func, bind_kernel(self.func, args, kwargs), targets)
        kept = {name: value for name, value in kwargs.items() if name not in TENSOR_OPTIONS}
        return bind_fastest(twin, args, kept | dict(zip(out_names(twin), results, strict=True)))


def bind_fastest(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Bind a public function if it is the same call, else the kernel."""
    for public in _public_calls(func, args, kwargs):
        if is_same_call(public, partial(func, *args, **kwargs)):
            return public
    return bind_kernel(func, args, kwargs)


def is_same_call(one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    """Whether both reach the dispatcher with the same op and the same values; nothing runs."""
    try:
        return _same(_DryRun.calls_of(one), _DryRun.calls_of(other))
    except (TypeError, ValueError, RuntimeError):
        return False  # the public function takes no such arguments


def span(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor's elements, and the one after the last."""
    if tensor.numel() == 0:
        return (0, 0)
    start = tensor.data_ptr()
    reach = sum((count - 1) * step for count, step in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (1 + reach) * tensor.element_size()


def _run_and_copy(func: OpOverload, run: Callable[[], Any], targets: list[Tensor | None]) -> None:
    for target, value in zip(targets, leaves_of(run()), strict=True):
        if target is not None:
            if value.size() != target.size() or value.dtype != target.dtype:
                raise CaptureError(
                    f"{func.name()} returned {value.dtype} {list(value.size())}, but its fake (meta) kernel said "
                    f"{target.dtype} {list(target.size())}: correct the fake, torch.library.opcheck finds such faults"
                )
            target.copy_(value)


def _public_calls(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Public functions that may be this op, with the arguments bound."""
    tensors = [leaf for leaf in leaves_of(args) if isinstance(leaf, Tensor)]
    if func.namespace != "aten" or not tensors:
        return  # without a tensor among them, a default device of the caller would get into the call
    outs = out_names(func)
    if outs:
        values = tuple(kwargs[name] for name in outs)
        others = {name: value for name, value in kwargs.items() if name not in outs}
        for home in (torch, torch._C._nn):
            function = getattr(home, func._opname, None)
            if isinstance(function, BuiltinFunctionType):
                yield partial(function, *args, **others, out=values if len(values) > 1 else values[0])
    elif isinstance(args[0], Tensor) and hasattr(args[0], func._opname):
        yield partial(getattr(args[0], func._opname), *args[1:], **kwargs)


class _DryRun(TorchDispatchMode):
    """Notes what reaches the dispatcher and runs none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @classmethod
    def calls_of(cls, call: Callable[[], Any]) -> list[Any]:
        mode = cls()
        with mode:
            call()
        return mode.calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls.append((func, args, kwargs))
        written = [a.name for a in func._schema.arguments if a.is_out]
        values = [kwargs[name] for name in written] if written else list(args[: len(func._schema.returns)])
        return values[0] if len(values) == 1 else values


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and one == other)
