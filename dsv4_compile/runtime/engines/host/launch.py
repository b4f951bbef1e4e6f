"""One recorded kernel, or compiled function, and how it becomes a call without arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ....analysis.byte_ranges import byte_range, ranges_meet
from ....compat.dispatch import OpArgs, OpKwargs, OpOverload, Tree
from ....errors import CaptureError
from ....graph.op_properties import undeclared_writes
from .fast_call import bind_fastest
from .op_kinds import argument_values, is_opaque
from .out_variants import TENSOR_OPTIONS, ignores_autocast, out_names, out_variant
from .pool import Lease, PoolBlock
from .tree import leaves_of, map_leaves


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor that a launch reads or writes: an alias, so that it stays what it was when it was recorded.

    Attributes:
        tensor: the alias.
        block: the pool block that the memory is in, None for memory of the caller.
        lease: the block's lease when this was recorded.
    """

    tensor: Tensor
    block: PoolBlock | None = None
    lease: Lease | None = None

    def overlaps(self, other: Operand) -> bool:
        """Whether the address ranges of both meet."""
        return ranges_meet(byte_range(self.tensor), byte_range(other.tensor))


@dataclass(eq=False, slots=True)
class Launch:
    """A kernel with its arguments.

    Attributes:
        func: the op.
        args: as it was called, with an `Operand` in place of each tensor.
        kwargs: likewise.
        returns: what it makes, flat; None where that is no new tensor or not wanted. The first argument of an op
            that fills a new tensor is among them.
        operands: everything that it touches.
    """

    func: OpOverload
    args: OpArgs
    kwargs: OpKwargs
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
    def fills_argument(self) -> bool:
        """Whether its result is new, and its first argument."""
        return bool(self.args) and self.args[0] in self.results

    @property
    def is_copy(self) -> bool:
        """Whether it copies its second argument to its first."""
        return self.func is torch.ops.aten.copy_.default

    @property
    def name(self) -> str:
        """For errors."""
        return str(self.func.name())

    def written_operands(self) -> list[Operand]:
        """What it writes: results, and the arguments that the schema, or what is known of the op, says so of."""
        given = list(argument_values(self.func, self.args, self.kwargs))
        undeclared = undeclared_writes(self.func, {argument.name: value for argument, value in given})
        written = [value for argument, value in given if _is_written(argument) or argument.name in undeclared]
        changed = [leaf for value in written for leaf in leaves_of(value)]
        return [*(leaf for leaf in changed if isinstance(leaf, Operand)), *self.results]

    @property
    def copies_results(self) -> bool:
        """Whether the kernel makes its results itself, and they are copied to where they belong."""
        return out_variant(self.func) is None and not self.fills_argument

    @property
    def ignores_autocast(self) -> bool:
        """Whether it does the same under autocast."""
        return ignores_autocast(self.func)

    @property
    def opaque(self) -> bool:
        """Whether it may touch memory that its operands do not show."""
        return is_opaque(self.func)

    def bind(self) -> Callable[[], object]:
        """A call without arguments that runs the kernel and leaves its results in `results`."""
        args, kwargs = map_leaves(lambda operand: operand.tensor, Operand, (self.args, self.kwargs))
        results = [operand.tensor for operand in self.results]
        if not results or self.fills_argument:
            return bind_fastest(self.func, args, kwargs)
        variant = out_variant(self.func)
        if variant is None:
            targets = [None if operand is None else operand.tensor for operand in self.returns]
            run = bind_fastest(self.func, args, kwargs)
            if [str(value.type) for value in self.func._schema.returns] == ["Tensor"]:
                return partial(_run_and_copy_one, self.func.name(), run, results[0])
            return partial(_run_and_copy, self.func.name(), run, targets)
        kept = {name: value for name, value in kwargs.items() if name not in TENSOR_OPTIONS}
        return bind_fastest(variant, args, kept | dict(zip(out_names(variant), results, strict=True)))


@dataclass(eq=False, slots=True)
class FunctionLaunch:
    """A compiled function with its arguments.

    Attributes:
        name: for errors.
        function: takes `args`.
        args: as for a `Launch`.
        written: which of them it writes.
        results: where the tensors it returns are copied to.
        operands: as for a `Launch`.
        autocast: whether autocast was on when it was recorded, and its dtype.
    """

    name: str
    function: Callable[..., object]
    args: OpArgs
    written: tuple[bool, ...]
    results: list[Operand]
    operands: list[Operand] = field(init=False)
    autocast: tuple[bool, torch.dtype] = field(init=False)

    # as a `Launch` answers
    opaque = True
    ignores_autocast = False

    def __post_init__(self) -> None:
        self.operands = [*(arg for arg in self.args if isinstance(arg, Operand)), *self.results]
        self.autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))

    def written_operands(self) -> list[Operand]:
        """What it writes."""
        changed = (arg for arg, is_written in zip(self.args, self.written, strict=True) if is_written)
        return [*(arg for arg in changed if isinstance(arg, Operand)), *self.results]

    def bind(self) -> Callable[[], object]:
        """A call without arguments, under the autocast of the capture."""
        args = map_leaves(lambda operand: operand.tensor, Operand, self.args)
        run: Callable[[], object] = partial(self.function, *args)
        if self.results:
            run = partial(_run_and_copy, self.name, run, [operand.tensor for operand in self.results])
        is_on, dtype = self.autocast
        return partial(_run_in_autocast, run, dtype) if is_on else run


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


AnyLaunch = Launch | FunctionLaunch


def _run_in_autocast(run: Callable[[], object], dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        run()


def _run_and_copy(name: str, run: Callable[[], Tree], targets: list[Tensor | None]) -> None:
    for target, value in zip(targets, leaves_of(run()), strict=True):
        if target is not None:
            _copy_result(name, target, value)


def _run_and_copy_one(name: str, run: Callable[[], Tree], target: Tensor) -> None:
    _copy_result(name, target, run())


def _copy_result(name: str, target: Tensor, value: Tensor) -> None:
    if value.size() != target.size() or value.dtype != target.dtype:
        raise CaptureError(
            f"{name} returned {value.dtype} {list(value.size())}, but its fake (meta) kernel said {target.dtype} "
            f"{list(target.size())}: correct the fake, torch.library.opcheck finds such faults"
        )
    target.copy_(value)
