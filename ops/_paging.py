"""Reading and writing rows of paged caches at fixed shape, where slot -1 means skip, exactly.

A cache is [num_blocks, block_size, width] and a slot is `block * block_size + offset`. Nothing here looks at a value
from the host, so all of it can be captured.

Note "exact skip": torch has no scatter that leaves rows out. Sending skipped rows to some real slot with its old
value races with a live row that writes the same slot. So a skipped row repeats the write of a live row (equal values,
any order is right), and only when no row is live does one slot get its own bits back.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows[t] to slot slots[t], skipping -1; see the note "exact skip".

    Args:
        cache: [num_blocks, block_size, width], written.
        slots: [T] int64, distinct where not -1.
        rows: [T, width], cast to the dtype of the cache.
    """
    if slots.shape[0] == 0:
        return
    live = slots >= 0
    source = torch.where(live, torch.arange(slots.shape[0], device=slots.device), live.to(torch.int32).argmax())
    slots = slots[source].clamp(min=0)
    values = torch.where(live.any(), rows[source].to(cache.dtype), cache[0, 0])
    block_size = cache.shape[1]
    cache.index_put_((slots // block_size, slots % block_size), values)


def read_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows at slots of any shape, zero where the slot is -1 whatever the cache holds: [*slots.shape, width]."""
    block_size = cache.shape[1]
    safe = slots.clamp(min=0)
    rows = cache[safe // block_size, safe % block_size]
    return torch.where((slots >= 0).unsqueeze(-1), rows, 0)


def locate(block_table: Tensor, requests: Tensor, index: Tensor, block_size: int) -> Tensor:
    """Slots of the index-th rows of requests, -1 where a request, an index or a block is -1.

    Args:
        block_table: [B, n] int32.
        requests: request rows, broadcastable to `index`.
        index: row numbers within a request, negative to skip.
        block_size: rows in a block.

    Returns:
        int64 of the shape of `index`.
    """
    wanted = (requests >= 0) & (index >= 0)
    index = torch.where(wanted, index, 0).to(torch.int64)
    blocks = block_table[requests.clamp(min=0).to(torch.int64), index // block_size].to(torch.int64)
    return torch.where(wanted & (blocks >= 0), blocks * block_size + index % block_size, -1)
