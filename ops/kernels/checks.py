"""Why a tensor does not fit a kernel: each check gives the reason, or None."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache_formats import FP8_DS_MLA, MXFP4, why_not_laid_out
from .table import architecture_of

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


def not_laid_out(
    cache_format: str, formats: Sequence[str], width: int, rope: int, **caches: Tensor | None
) -> str | None:
    """Another format than these, or the first cache that is not laid out so; the op in torch has the error for that."""
    if cache_format not in formats:
        return f"the cache format is {cache_format!r}"
    for name, cache in caches.items():
        reason = None if cache is None else why_not_laid_out(cache, cache_format, width, rope)
        if reason is not None:
            return f"{name} is {reason}"
        if cache is not None and cache.stride()[1:] != (cache.shape[2], 1):
            return f"the pages of {name} are not contiguous"
    return None


def not_packable(cache_format: str, width: int) -> str | None:
    """A width that kernels do not pack, though the format has a rule for it."""
    group, most = {FP8_DS_MLA: (64, 512), MXFP4: (32, 128)}.get(cache_format, (1, width))
    if group <= width <= most:
        return None
    return f"entries have {width} values, and the kernel packs {group} to {most} into {cache_format!r}"


def not_rows(tokens: int, **tensors: Tensor) -> str | None:
    """The first tensor that does not have a row for each token."""
    for name, tensor in tensors.items():
        if tensor.shape[0] != tokens:
            return f"{name} has {tensor.shape[0]} rows, of {tokens} tokens"
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
