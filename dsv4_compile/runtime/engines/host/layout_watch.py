"""Whether kernels lay out their results as meta kernels say; looked at in warm-ups, where both can be asked.

A recorder runs no kernel, so it takes sizes, strides and dtypes of results from meta kernels. A few of these differ
from the CPU kernel (`max_unpool2d` and `convolution` of channels-last tensors, `native_batch_norm` in eval mode). What
is recorded after such an op would be laid out otherwise than in eager, and a strided view of it would show other
elements. So what the kernel gave is kept, and the recorder goes by it; also for an op that has no meta kernel at all.
One for which that cannot be done is named.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ....compat.dispatch import (
    NoFunctionModes,
    Op,
    OpArgs,
    OpKwargs,
    OpOverload,
    TorchDispatchMode,
    Tree,
    call_composite_kernel,
    op_name,
)
from ....compat.thread_state import OutsideInferenceMode
from ....graph.op_properties import OWN_NAMESPACES
from .call_site import CallSite
from .meta_cache import MetaCache
from .op_kinds import OpKind, kind_of
from .result_meta import MetaArguments, is_meta_tensor, on_meta
from .tree import leaves_of

_INFERRED = (OpKind.LAUNCH, OpKind.ALLOCATION, OpKind.FILL)


class LayoutWatch(TorchDispatchMode):
    """Runs every op, and compares what ops of torch's own give with what their meta kernels say.

    Args:
        meta_cache: is told what differs.

    Attributes:
        other_op: "ns::op.overload" of the first that differs and cannot be kept, or None.
    """

    supports_higher_order_operators = True

    def __init__(self, meta_cache: MetaCache) -> None:
        super().__init__()
        self._meta_cache = meta_cache
        self._site = CallSite()
        self.other_op: str | None = None

    def run(self, function: Callable[[], object]) -> None:
        """Call a function, watching its ops."""
        with self, self._site:
            function()

    def __torch_dispatch__(self, func: Op, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None) -> Tree:
        kwargs = kwargs or {}
        if self.other_op is not None or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if func.namespace not in OWN_NAMESPACES:
            with self._site.state_of(func):
                return func(*args, **kwargs)
        with NoFunctionModes():
            kind = kind_of(func)
        if kind is OpKind.COMPOSITE:  # whole in inference mode; a recorder takes it apart too
            with self:
                return call_composite_kernel(func, args, kwargs)
        if kind not in _INFERRED:
            return func(*args, **kwargs)
        with NoFunctionModes():
            said = _said_by_meta(func, args, kwargs)  # before, since the op may change its arguments
        result = func(*args, **kwargs)
        if said is None or any(map(_differ, leaves_of(result), said)):
            with NoFunctionModes(), OutsideInferenceMode():
                if not self._meta_cache.keep_real(func, args, kwargs, result):
                    self.other_op = op_name(func)
        return result


def _said_by_meta(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> list[Tree] | None:
    """Leaves of what the meta kernel gives, or might give; None if the op makes something and has no such kernel."""
    meta = MetaArguments()
    try:
        return list(leaves_of(func(*meta.of(args), **meta.of(on_meta(func, kwargs)))))
    except NotImplementedError:
        return None if any(value.alias_info is None for value in func._schema.returns) else []
    except Exception:
        return []  # a recorder that asks again refuses the op, with the reason


def _differ(real: Tree, said: Tree) -> bool:
    if not isinstance(real, Tensor) or not is_meta_tensor(said) or is_meta_tensor(real):
        return False
    if real.dtype != said.dtype or real.size() != said.size():
        return True
    pairs = zip(real.size(), real.stride(), said.stride(), strict=True)
    return real.numel() > 0 and any(size > 1 and stride != other for size, stride, other in pairs)
