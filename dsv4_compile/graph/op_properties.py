"""Facts about single ops that planning and recording both go by: whose they are, and what no graph can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor, fx

from ..compat.dispatch import OpKwargs, OpOverload, Tree, pytree

# Torch's own: their schemas tell all that they do.
OWN_NAMESPACES = frozenset(["aten", "prim", "prims", "profiler"])
# Ops that allocate and leave the filling to somebody else.
ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])
# Where torch keeps its collectives, in which several processes take part.
_COLLECTIVES = frozenset(
    ["c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"]
)
# aten's own undeclared views: they may only be used where the input is not seen again
UNDECLARED_VIEWS = frozenset(["_unsafe_view", "_reshape_alias"])
# aten's own undeclared writes, to running statistics; where there is an argument `training`, only if it is True
_KEEP_STATISTICS = frozenset(
    [
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_update_stats",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    ]
)
_STATISTICS = frozenset(["running_mean", "running_var"])
# Raise where a number on the host is not as it should be, and return nothing.
_NUMBER_CHECKS = frozenset(["_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"])
# Raise where data is not; their kernels see to that, on a GPU long after the call.
_DATA_CHECKS = frozenset(["_assert_async", "_functional_assert_async"])
_INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"])


def aten_name(func: object) -> str:
    """ "empty_like" for aten::empty_like.default; the empty text for what is not of aten, whatever its name."""
    return str(func._opname) if isinstance(func, OpOverload) and func.namespace == "aten" else ""


def is_allocation(func: object) -> bool:
    """One of aten's own `empty` family."""
    return aten_name(func) in ALLOCATIONS


def bind_arguments(func: OpOverload, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> OpKwargs:
    """The arguments of a call by their names in the schema."""
    return {**dict(zip(_argument_names(func), args, strict=False)), **kwargs}


@cache
def _argument_names(func: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def is_collective(func: object) -> TypeGuard[OpOverload]:
    """An op in which the processes of a group take part, all of them in the same order."""
    return isinstance(func, OpOverload) and func.namespace in _COLLECTIVES


def is_wait(func: object) -> bool:
    """`wait_tensor`: it returns its very argument, whose data is there from then on; the schema says neither."""
    return is_collective(func) and str(func._opname) in ("wait_tensor", "_wrap_tensor_autograd")


def group_of(bound: Mapping[str, Tree]) -> object:
    """The group among the arguments of a collective, most often by its name; None if there is none."""
    return bound.get("group_name", bound.get("group"))


def undeclared_writes(func: OpOverload, bound: Mapping[str, Tree]) -> frozenset[str]:
    """Arguments that an op writes although its schema does not say so: torch's batch norms, and waits."""
    if is_wait(func):
        return frozenset(_argument_names(func))
    keeps = aten_name(func) in _KEEP_STATISTICS and bound.get("training", True)
    return _STATISTICS if keeps else frozenset()


def cudagraph_unsafe_reason(func: OpOverload, bound: Mapping[str, Tree]) -> str | None:
    """What an op does, called with these arguments, that a graph cannot replay; None if it is nothing.

    Args:
        func: the op.
        bound: its arguments by name, as tensors, fakes or numbers.
    """
    if aten_name(func) in _INDEXING:
        # they carry the dynamic-shape tag for the sake of masks, and most calls have none
        return "indexes with a mask, so its work depends on data" if _has_mask(bound.get("indices")) else None
    if aten_name(func) == "repeat_interleave" and bound.get("output_size") is not None:
        return None
    if torch.Tag.data_dependent_output in func.tags or aten_name(func) == "_linalg_check_errors":
        return "needs a device-to-host sync"
    if torch.Tag.dynamic_output_shape in func.tags:
        return "returns a tensor whose size depends on data"
    return "is tagged cudagraph_unsafe" if torch.Tag.cudagraph_unsafe in func.tags else None


def _has_mask(indices: object) -> bool:
    masks = (torch.bool, torch.uint8)
    return any(isinstance(leaf, Tensor) and leaf.dtype in masks for leaf in pytree.tree_leaves(indices))


def is_number_check(node: fx.Node) -> bool:
    """`torch._check` and its kin, which raise where a number on the host is not as it should be."""
    name = "" if node.op == "call_method" else own_name(node)
    return name in _NUMBER_CHECKS or (name.startswith("_check") and not isinstance(node.target, OpOverload))


def checks_data(op: str) -> bool:
    """Whether "ns::op.overload" raises where the data of a tensor is not as it should be."""
    namespace, _, rest = op.partition("::")
    return namespace == "aten" and rest.partition(".")[0] in _DATA_CHECKS


def strided_name(node: fx.Node) -> str:
    """ "as_strided" or a sibling of that name, if a node calls torch's own; the empty text otherwise."""
    name = own_name(node)
    return name if "as_strided" in name else ""


def own_name(node: fx.Node) -> str:
    """The bare name of what a node calls, if it is torch's own: "linear", "as_strided"; the empty text otherwise."""
    target = node.target
    if node.op == "call_method":
        return str(target)
    if isinstance(target, OpOverload):
        return aten_name(target)
    module = getattr(target, "__module__", None) or "torch"  # builtins of torch name none
    return str(getattr(target, "__name__", "")) if module.partition(".")[0] == "torch" else ""
