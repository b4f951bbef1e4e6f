"""The fastest call of an op: a public function with its arguments bound.

`partial(torch.mm, a, b, out=c)` takes about half the time of the op `aten::mm.out` itself. A public function picks an
overload by its own rules, so one is only taken once a dry run has shown that both calls reach the dispatcher alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType

from torch import Tensor

from ....compat.dispatch import PUBLIC_HOMES, Op, OpArgs, OpKwargs, OpOverload, TorchDispatchMode, Tree
from ....compat.thread_state import leave_modes
from .op_kinds import bind_kernel
from .out_variants import out_names
from .tree import leaves_of


def bind_fastest(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Callable[[], object]:
    """Bind a public function if it is the same call, else the op's kernel."""
    for public in _public_calls(func, args, kwargs):
        if is_same_call(public, partial(func, *args, **kwargs)):
            return public
    return bind_kernel(func, args, kwargs)


def is_same_call(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether both reach the dispatcher first with the same op and the same values; nothing runs."""
    try:
        return _same(_DryRun.first_call(one), _DryRun.first_call(other))
    except (TypeError, ValueError, RuntimeError):
        # the public function takes no such arguments; or a signal handler raised, at the end of a dry run perhaps
        leave_modes(_DryRun)
        return False


def _public_calls(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Iterator[Callable[[], object]]:
    """Public functions of the op's name, with the arguments bound."""
    if func.namespace != "aten" or not any(isinstance(leaf, Tensor) for leaf in leaves_of(args)):
        return  # without a tensor among them, a default device of the caller would get into the call
    outs = [kwargs[name] for name in out_names(func)]
    others = {name: value for name, value in kwargs.items() if name not in out_names(func)}
    if outs:
        others["out"] = tuple(outs) if len(outs) > 1 else outs[0]
    for home in PUBLIC_HOMES:
        function = getattr(home, func._opname, None)
        if isinstance(function, BuiltinFunctionType):
            yield partial(function, *args, **others)
    if not outs and isinstance(args[0], Tensor) and hasattr(args[0], func._opname):
        yield partial(getattr(args[0], func._opname), *args[1:], **others)


class _ReachedError(Exception):
    """The dispatcher was reached."""


class _DryRun(TorchDispatchMode):
    """Notes what reaches the dispatcher first, and runs none of it."""

    call: object = None

    @classmethod
    def first_call(cls, call: Callable[[], object]) -> object:
        mode = cls()
        with suppress(_ReachedError), mode:
            call()
        return mode.call

    def __torch_dispatch__(self, func: Op, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None) -> Tree:
        self.call = (func, args, kwargs or {})
        raise _ReachedError


def _same(one: object, other: object) -> bool:
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and one == other)
