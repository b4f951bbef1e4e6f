"""The dispatch mode that records ops instead of running them.

Sizes, strides and dtypes of results come from torch's meta kernels, their memory from the pool, filled with poison.
Views and questions about sizes run for real, since they launch nothing. All torch calls of the recorder itself are
made outside inference mode, so that a replay may write to the memory in any mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from ....analysis.sizes import bytes_needed
from ....compat.dispatch import (
    NoFunctionModes,
    Op,
    OpArgs,
    OpKwargs,
    OpOverload,
    TorchDispatchMode,
    Tree,
    bind_cpu_kernel,
    call_composite_kernel,
)
from ....compat.thread_state import NoDispatchModes, OutsideInferenceMode
from ....errors import CaptureError
from .copy_elision import drop_unused_results, elide_copies
from .launch import AnyLaunch, FunctionLaunch, Launch, Operand
from .meta_cache import MetaCache, key_of_call
from .op_kinds import OpKind, fill_value, kind_of, why_kernel_is_refused
from .out_variants import out_names
from .pool import HostPool, PoolBlock, tensor_in
from .result_meta import MetaArguments, is_meta_tensor, is_meta_work, on_meta, returned_arguments, why_foreign
from .stream_log import HostStreams
from .sync_guard import HostReadGuard, refusal, why_refused
from .tree import leaves_of, map_leaves

Result = TypeVar("Result")
_COPIES = ("clone", "_to_copy")


class Recorder(TorchDispatchMode):
    """Records the ops of one capture.

    Args:
        pool: where the memory of new tensors comes from.
        name: what is recorded, for errors.
        meta_cache: what is known of results.
        stream_seed: in which of the orders that events allow launches on several streams are replayed; None for the one
            in which they were recorded.
    """

    # so that one is refused by a message of ours
    supports_higher_order_operators = True

    def __init__(self, pool: HostPool, name: str, meta_cache: MetaCache, stream_seed: int | None = None) -> None:
        super().__init__()
        self.launches: list[AnyLaunch] = []
        self._pending: list[AnyLaunch] = []  # of the op that is being recorded
        self.streams = HostStreams(stream_seed)
        self._pool = pool
        self._name = name
        self._meta_cache = meta_cache
        self._guard = HostReadGuard(name)
        self._failure: CaptureError | None = None
        self._blocks: set[PoolBlock] = set()

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function, recording its ops."""
        with self, self._guard:
            return function()

    def record_function(
        self,
        name: str,
        function: Callable[..., object],
        args: Sequence[Tree],
        written: Sequence[bool],
        returns: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """See `capture_state.OpaqueRecorder`."""
        with NoDispatchModes(), NoFunctionModes(), OutsideInferenceMode():
            operands = map_leaves(self._operand, Tensor, tuple(args))
            made = [self._allocate(like) for like in returns]
            results = [self._operand(tensor) for tensor in made]
            self._add(FunctionLaunch(name, function, operands, tuple(written), results))
            return made

    def finish(self) -> list[Callable[[], object]]:
        """Calls that replay what was recorded, in order.

        Raises:
            CaptureError: something was refused, and the recorded code went on as if nothing had happened.
        """
        failure = self._failure or self._guard.failure
        if failure is not None:
            raise failure
        with OutsideInferenceMode():
            if self.streams.are_used:
                # a copy that is left out is a matter of order, and the order here is only one of many
                self.launches = self.streams.checked_order()
            else:
                self.launches = elide_copies(self.launches)
            drop_unused_results(self.launches)
            return [launch.bind() for launch in self.launches]

    def used_blocks(self) -> list[PoolBlock]:
        """Pool blocks that the launches touch."""
        operands = [operand for launch in self.launches for operand in launch.operands]
        return list({operand.block for operand in operands if operand.block is not None})

    def abandon(self) -> None:
        """Give the memory back: an exception that is on its way keeps this object alive."""
        self.launches.clear()
        self._pending.clear()
        self.streams.clear()
        self._blocks.clear()

    def __torch_dispatch__(self, func: Op, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None) -> Tree:
        kwargs = kwargs or {}
        # reading a tensor's attributes calls the guard, and so do meta kernels that are Python: none of its business
        with NoFunctionModes():
            if not isinstance(func, OpOverload):
                self._refuse(f"higher-order op {func}", "decides on the host what it runs")
            kind = self._check(func, args, kwargs)
            if kind is OpKind.METADATA:
                return func(*args, **kwargs)
            if kind not in (OpKind.COMPOSITE, OpKind.PYTHON):
                with OutsideInferenceMode():
                    return self._record(kind, func, args, kwargs)
        if kind is OpKind.PYTHON:
            with self._guard.state_of(func):
                return self.run(bind_cpu_kernel(func, args, kwargs))
        with self._guard.state_of(func), self:  # and without the guard, see `call_composite_kernel`
            return call_composite_kernel(func, args, kwargs)

    def _check(self, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> OpKind:
        foreign = next(filter(None, map(why_foreign, leaves_of((args, kwargs)))), None)
        kind = OpKind.METADATA if is_meta_work(args, kwargs) else kind_of(func)
        reason = foreign or why_refused(func, args, kwargs) or why_kernel_is_refused(kind, func)
        if reason:
            self._refuse(func.name(), reason)
        return kind

    def _record(self, kind: OpKind, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Tree:
        try:
            results = self._recorded(kind, func, args, kwargs)
        except CaptureError:
            raise
        except Exception as error:  # a layout that no launch has; or a call that is wrong, and raises once it runs
            self._refuse(func.name(), f"cannot be recorded ({' '.join(str(error).split())[:200]}),")
        for launch in self._pending:  # what fails from here on is no fault of the call
            self._add(launch)
        self._pending.clear()
        return results

    def _recorded(self, kind: OpKind, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Tree:
        if kind is OpKind.METADATA_IN_PLACE:
            return self._change_metadata(func, args, kwargs)
        if kind is OpKind.CONSTANT:
            return self._copy(self._allocate(args[0]), args[0])
        return self._make_results(kind, func, args, kwargs)

    def _refuse(self, what: str, reason: str) -> NoReturn:
        self._failure = refusal(what, reason, self._name)
        raise self._failure

    def _make_results(self, kind: OpKind, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Tree:
        """The op's results, and unless it only allocates, a launch that fills them."""
        inferred = self._infer(func, args, kwargs)
        results = map_leaves(self._allocate_like, Tensor, inferred)
        if kind is OpKind.FILL:
            return self._write(torch.ops.aten.fill_.Scalar, results, fill_value(func, args))
        if kind is OpKind.LAUNCH and func.namespace == "aten" and func._opname in _COPIES:
            return self._copy(results, args[0])
        if kind is OpKind.LAUNCH:
            fresh = map(is_meta_tensor, leaves_of(inferred))
            returns = [self._operand(r) if made else None for r, made in zip(leaves_of(results), fresh, strict=True)]
            args, kwargs = map_leaves(self._operand, Tensor, (args, kwargs))
            self._pending.append(Launch(func, args, kwargs, tuple(returns)))
        return results

    def _allocate_like(self, tensor: Tensor) -> Tensor:
        return self._allocate(tensor) if is_meta_tensor(tensor) else tensor

    def _copy(self, made: Tensor, source: Tensor) -> Tensor:
        """Record that a new tensor is filled from another one."""
        return self._write(torch.ops.aten.copy_.default, made, self._operand(source))

    def _write(self, func: OpOverload, made: Tensor, value: Tree) -> Tensor:
        target = self._operand(made)
        self._pending.append(Launch(func, (target, value), {}, (target,)))
        return made

    def _add(self, launch: AnyLaunch) -> None:
        self.launches.append(launch)
        self.streams.add(launch)

    def _operand(self, tensor: Tensor) -> Operand:
        block = self._pool.block_of(tensor)
        if block is None:
            return Operand(tensor.detach())
        return Operand(block.alias(tensor), block, block.lease)

    def _allocate(self, like: Tensor) -> Tensor:
        """A new, poisoned tensor of the size, strides and dtype of `like`."""
        nbytes = bytes_needed(like.size(), like.stride(), like.element_size())
        block = self._pool.take(nbytes, self.streams.current)
        self._blocks.add(block)  # the pool itself holds it weakly
        return tensor_in(block.start_lease(nbytes), like, 0)

    def _infer(self, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Tree:
        """What the op returns: its own arguments where it returns them, meta tensors for new ones."""
        key = key_of_call(func, args, kwargs)
        if (known := self._meta_cache.get(key, func, args, kwargs)) is not None:
            return known
        meta = MetaArguments()
        try:
            inferred = func(*meta.of(args), **meta.of(on_meta(func, kwargs)))
        except NotImplementedError:
            if all(value.alias_info is not None for value in func._schema.returns):
                return returned_arguments(func, args, kwargs)
            self._refuse(func.name(), "has no fake (meta) kernel, so the sizes of its results are unknown")
        for name in out_names(func):
            if self._fit(func, kwargs[name], meta.of(kwargs[name])):
                key = None
        results = meta.undo(inferred)
        self._meta_cache.keep(key, func, results)
        return results

    def _fit(self, func: OpOverload, tensor: Tensor, wanted: Tensor) -> bool:
        """Give an empty tensor, made in the capture, the memory that the op would give it by resizing it.

        Returns:
            Whether it had to.
        """
        if tensor.size() == wanted.size():
            return False
        if tensor.numel() > 0 or self._pool.block_of(tensor) is None:
            sizes = f"{list(tensor.size())} to {list(wanted.size())}"
            self._refuse(func.name(), f"resizes a tensor from {sizes}, which no replay repeats,")
        tensor.set_(self._allocate(wanted))  # type: ignore[call-overload]
        return True

    def _change_metadata(self, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Tree:
        tensor = args[0]
        if self._pool.block_of(tensor) is None and func._opname != "detach_":
            reason = "changes sizes or strides of a tensor made outside of the capture, which no replay repeats,"
            self._refuse(func.name(), reason)
        if func._opname in ("resize_", "resize_as_"):
            meta = MetaArguments()
            wanted = func(*meta.of(args), **kwargs)
            if bytes_needed(wanted.size(), wanted.stride(), wanted.element_size()) > tensor.untyped_storage().nbytes():
                self._fit(func, tensor, wanted)
                return tensor
        return func(*args, **kwargs)
