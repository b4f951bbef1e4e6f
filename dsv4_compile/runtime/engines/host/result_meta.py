"""Sizes, strides and dtypes of an op's results, from torch's meta kernels, without running the op.

A meta kernel is about fifteen times cheaper than the same question put to fake tensors, and sizes are plain numbers
when a piece is captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....compat.dispatch import OpArgs, OpKwargs, OpOverload, Tree
from .op_kinds import argument_values, has_argument
from .tree import leaves_of, map_leaves


class MetaArguments:
    """Tensors on the meta device that stand for the arguments of one call."""

    def __init__(self) -> None:
        self._meta: dict[int, Tensor] = {}
        self._originals: dict[int, Tensor] = {}

    def of(self, values: Tree) -> Tree:
        """The same values with meta tensors, and without generators, which are not on the meta device."""
        return map_leaves(self._as_meta, (Tensor, torch.Generator), values)

    def undo(self, values: Tree) -> Tree:
        """The same values with the original of each meta tensor; other tensors on the meta device stay."""
        return map_leaves(lambda value: self._originals.get(id(value), value), Tensor, values)

    def _as_meta(self, value: Tensor | torch.Generator) -> Tensor | None:
        if isinstance(value, torch.Generator):
            return None
        meta = self._meta.get(id(value))
        if meta is None:
            meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            self._meta[id(value)] = meta
            self._originals[id(meta)] = value
        return meta


def is_meta_tensor(value: object) -> bool:
    """Whether a value is a tensor on the meta device."""
    return isinstance(value, Tensor) and value.is_meta


def is_meta_work(args: OpArgs, kwargs: OpKwargs) -> bool:
    """Whether a call is about tensors without memory, so that there is nothing to record."""
    if any(is_meta_tensor(leaf) for leaf in leaves_of((args, kwargs))):
        return True
    device = kwargs.get("device")
    return isinstance(device, torch.device) and device.type == "meta"


def on_meta(func: OpOverload, kwargs: OpKwargs) -> OpKwargs:
    """The keyword arguments that make an op work on the meta device."""
    changed = dict(kwargs)
    if has_argument(func, "device"):
        changed["device"] = torch.device("meta")
    if "pin_memory" in changed:
        changed["pin_memory"] = None
    return changed


def returned_arguments(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> Tree:
    """What an op returns that returns nothing but arguments which it writes."""
    written = [value for argument, value in argument_values(func, args, kwargs) if argument.is_write]
    count = len(func._schema.returns)
    return None if count == 0 else written[0] if count == 1 else tuple(written[:count])


def why_foreign(value: object) -> str | None:
    """Why an argument is out of place in a captured graph of CPU work, or None."""
    if isinstance(value, torch.device):
        return None if value.type in ("cpu", "meta") else f"works on {value}, and this engine records work of the CPU,"
    if not isinstance(value, Tensor):
        return None
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"was called with a {type(value).__name__}, which is no plain tensor,"
    if value.layout is not torch.strided:
        return f"was called with a tensor of layout {value.layout}, which has no single address,"
    return why_foreign(value.device)
