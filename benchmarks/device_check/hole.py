"""A stand-in for the two split ops that a graph can hold: same arguments, fixed shapes, no value read by the host.

The ops of this package are written to be read: they launch some thirty kernels and ask for values. A step with them
cannot be one graph, and what they take hides all else. With these kernels in their place all rows of a comparison still
do the same: the model, its graph and its plan are as they were, and only what the ops launch is another thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.library import Library

SPLIT_OPS = ("dsv4::sparse_indexer", "dsv4::forward_mqa")


@contextmanager
def light_ops(device: str) -> Iterator[None]:
    """Have the split ops do little on a device, inside of the block."""
    library = Library("dsv4", "IMPL")
    try:
        for name, kernel in (("forward_mqa", _attend), ("sparse_indexer", _select)):
            library.impl(name, kernel, "CUDA" if device == "cuda" else "CPU")
        yield
    finally:
        library._destroy()


def _attend(
    q: Tensor,
    attn_sink: Tensor,
    positions: Tensor,
    token_to_req: Tensor,
    swa_cache: Tensor,
    swa_block_table: Tensor,
    kv_cache: Tensor | None,
    block_table: Tensor | None,
    topk_indices: Tensor | None,
    window: int,
    ratio: int,
    scale: float,
    out: Tensor,
    kv_cache_dtype: str = "auto",
    rope_dims: int = 64,
    scratch: Tensor | None = None,
) -> None:
    """Attention over the first rows of the cache: it reads what captured pieces have written."""
    keys = swa_cache.flatten(0, 1)[:window].to(q.dtype)
    weights = torch.softmax(q.flatten(0, 1) @ keys.T * scale, dim=-1)
    torch.mm(weights, keys, out=out.view(-1, out.shape[-1]))


def _select(
    index_q: Tensor,
    index_q_scale: Tensor | None,
    index_weights: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    ratio: int,
    topk_indices: Tensor,
    index_cache_dtype: str = "auto",
    scratch: Tensor | None = None,
) -> None:
    """The first blocks of each token."""
    ids = torch.arange(topk_indices.shape[1], dtype=torch.int32, device=positions.device)
    completed = (positions + 1) // ratio
    topk_indices[: positions.shape[0]].copy_(torch.where(ids < completed.unsqueeze(1), ids, -1))
