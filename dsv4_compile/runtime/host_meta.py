"""Sizes, strides and dtypes of an op's results, from torch's meta kernels, without running the op.

A meta kernel is about fifteen times cheaper than the same question put to fake tensors, and sizes are plain numbers
when a piece is captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compat import OpOverload
from .host_ops import argument_values, has_argument
from .host_values import leaves_of, map_leaves


class Twins:
    """Tensors on the meta device that stand for the arguments of one call."""

    def __init__(self) -> None:
        self._twins: dict[int, Tensor] = {}
        self._originals: dict[int, Tensor] = {}

    def of(self, values: Any) -> Any:
        """The same values with twins of tensors, and without generators, which are not on the meta device."""
        return map_leaves(self._twin, (Tensor, torch.Generator), values)

    def undo(self, values: Any) -> Any:
        """The same values with the original of each twin; other tensors on the meta device stay."""
        return map_leaves(lambda value: self._originals.get(id(value), value), Tensor, values)

    def _twin(self, value: Tensor | torch.Generator) -> Tensor | None:
        if isinstance(value, torch.Generator):
            return None
        twin = self._twins.get(id(value))
        if twin is None:
            twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            self._twins[id(value)] = twin
            self._originals[id(twin)] = value
        return twin


def is_twin(value: Any) -> bool:
    """Whether a value is a tensor on the meta device."""
    return isinstance(value, Tensor) and value.is_meta


def is_meta_work(args: Any, kwargs: Any) -> bool:
    """Whether a call is about tensors without memory, so that there is nothing to record."""
    if any(is_twin(leaf) for leaf in leaves_of((args, kwargs))):
        return True
    device = kwargs.get("device")
    return isinstance(device, torch.device) and device.type == "meta"


def on_meta(func: OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that make an op work on the meta device."""
    changed = dict(kwargs)
    if has_argument(func, "device"):
        changed["device"] = torch.device("meta")
    if "pin_memory" in changed:
        changed["pin_memory"] = None
    return changed


def returned_arguments(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """What an op returns that returns nothing but arguments which it writes."""
    written = [value for argument, value in argument_values(func, args, kwargs) if argument.is_write]
    count = len(func._schema.returns)
    return None if count == 0 else written[0] if count == 1 else tuple(written[:count])


def why_foreign(value: Any) -> str | None:
    """Why an argument is out of place in a recording of CPU work, or None."""
    if isinstance(value, torch.device):
        return None if value.type in ("cpu", "meta") else f"works on {value}, and this engine records work of the CPU,"
    if not isinstance(value, Tensor):
        return None
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"was called with a {type(value).__name__}, which is no plain tensor,"
    if value.layout is not torch.strided:
        return f"was called with a tensor of layout {value.layout}, which has no single address,"
    return why_foreign(value.device)
