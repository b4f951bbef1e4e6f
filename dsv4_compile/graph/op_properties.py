"""Facts about single ops that planning and recording both go by: whose they are, and what no graph can hold."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ..compat.dispatch import OpOverload, pytree

# Torch's own: their schemas tell all that they do.
OWN_NAMESPACES = frozenset(["aten", "prim", "prims", "profiler"])
# Ops that allocate and leave the filling to somebody else.
ALLOCATIONS = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])
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
_INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"])


def aten_name(func: Any) -> str:
    """ "empty_like" for aten::empty_like.default; the empty text for what is not of aten, whatever its name."""
    return str(func._opname) if isinstance(func, OpOverload) and func.namespace == "aten" else ""


def is_allocation(func: Any) -> bool:
    """One of aten's own `empty` family."""
    return aten_name(func) in ALLOCATIONS


def bind_arguments(func: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names in the schema."""
    return {**dict(zip(_argument_names(func), args, strict=False)), **kwargs}


@cache
def _argument_names(func: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


def undeclared_writes(func: OpOverload, bound: Mapping[str, Any]) -> frozenset[str]:
    """Arguments that an op writes although its schema does not say so; torch's batch norms are the only ones known."""
    keeps = aten_name(func) in _KEEP_STATISTICS and bound.get("training", True)
    return _STATISTICS if keeps else frozenset()


def cudagraph_unsafe_reason(func: OpOverload, bound: Mapping[str, Any]) -> str | None:
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


def _has_mask(indices: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return any(isinstance(leaf, Tensor) and leaf.dtype in masks for leaf in pytree.tree_leaves(indices))


def strided_name(node: fx.Node) -> str:
    """ "as_strided" or a sibling of that name, if a node calls torch's own; the empty text otherwise."""
    target = node.target
    if node.op == "call_method":
        name = str(target)
    elif isinstance(target, OpOverload):
        name = aten_name(target)
    else:
        module = getattr(target, "__module__", None) or "torch"  # builtins of torch name none
        name = str(getattr(target, "__name__", "")) if module.partition(".")[0] == "torch" else ""
    return name if "as_strided" in name else ""
