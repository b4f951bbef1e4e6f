"""Why a tensor does not fit a kernel: each check gives the reason, or None."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .table import PLAIN, architecture_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def first_reason(*reasons: str | None) -> str | None:
    """The first one that there is."""
    return next((reason for reason in reasons if reason is not None), None)


def no_architecture(device: torch.device) -> str | None:
    """Whether the table has nothing for a device."""
    return None if architecture_of(device) else f"there is no kernel for {torch.cuda.get_device_name(device)}"


def not_a(dtypes: Sequence[torch.dtype], **tensors: Tensor | None) -> str | None:
    """The first tensor of another dtype."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in dtypes:
            return f"{name} is {tensor.dtype}, and the kernel takes {' or '.join(map(str, dtypes))}"
    return None


def not_plain(**formats: str) -> str | None:
    """The first cache format but plain rows."""
    for name, cache_format in formats.items():
        if cache_format != PLAIN:
            return f"{name} is {cache_format!r}, and the kernel takes {PLAIN!r}"
    return None


def not_power_of_two(**sizes: int) -> str | None:
    """The first size that is none, or too small for a tensor core."""
    for name, size in sizes.items():
        if size < 16 or size & (size - 1):
            return f"{name} is {size}, and the kernel takes powers of two from 16"
    return None


def not_contiguous(**tensors: Tensor | None) -> str | None:
    """The first tensor whose rows do not lie one after another."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} is not contiguous"
    return None


def not_pages(**caches: Tensor | None) -> str | None:
    """The first cache whose pages, wherever they lie, do not have their rows one after another."""
    for name, cache in caches.items():
        if cache is not None and cache.stride()[1:] != (cache.shape[2], 1):
            return f"the pages of {name} are not contiguous"
    return None
