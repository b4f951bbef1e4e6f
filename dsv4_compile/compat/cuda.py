"""Private names about CUDA's allocator and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

PoolHandle: TypeAlias = "_POOL_HANDLE"  # of a graph memory pool


def stop_recording_to_pool(device_index: int, handle: PoolHandle) -> None:
    """Undo what the begin of a capture did to a graph memory pool, for a capture that torch cannot end."""
    try:
        torch._C._cuda_endAllocateToPool(device_index, handle)
    except RuntimeError:
        return  # it was ended; in torch 2.13 its use of the pool is never given back, later the graph does that
    torch._C._cuda_releasePool(device_index, handle)
