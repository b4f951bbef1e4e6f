"""`dsv4::forward_mqa`: one-head attention over the sliding window and the compressed entries, with a sink per head.

A split op: in torch, how many compressed entries there are is decided on the host. Recent tokens are seen twice, raw in
the window and compressed. Keys are values. Rows that no valid index names may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._library import define_op
from ._paging import locate
from .cache_formats import KV_FORMATS, check_cache, check_format, gather_entries

SCHEMA = (
    "forward_mqa(Tensor q, Tensor attn_sink, Tensor positions, Tensor token_to_req, Tensor swa_cache, "
    "Tensor swa_block_table, Tensor? kv_cache, Tensor? block_table, Tensor? topk_indices, int window, int ratio, "
    'float scale, Tensor(a!) out, str kv_cache_dtype="auto", int rope_dims=64, Tensor(b!)? scratch=None) -> ()'
)
# elements of the gathered keys [tokens, entries, D] at once (256 MB of fp32)
_GATHER_BUDGET = 1 << 26


def forward_mqa(
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
    """Sparse attention in fp32.

    Args:
        q: [T, H, D], rotated.
        attn_sink: [H], a logit that joins the denominator only.
        positions: [T] int64.
        token_to_req: [T] int32, -1 for padding.
        swa_cache: [num_blocks, block_size, D], or bytes of a packed format.
        swa_block_table: [B, n] int32, blocks of `swa_cache`.
        kv_cache: compressed entries in the same format; None if ratio is 0.
        block_table: [B, n] int32, blocks of `kv_cache`; None if ratio is 0.
        topk_indices: [max_tokens, K] int32, block ids within the request, -1 to skip; None: all completed ones.
        window: tokens of the sliding window, the token itself included.
        ratio: tokens of a compressed block; 0: window only.
        scale: of the logits.
        out: [T, H, D], every row written, padded rows with zero.
        kv_cache_dtype: of both caches; "auto": rows in the dtype of the cache; or "fp8_ds_mla".
        rope_dims: the last dims of an entry, which "fp8_ds_mla" keeps in bf16; else not read.
        scratch: fp32 of any size, whose values mean nothing before and after; kernels on a GPU split their work in it.

    Raises:
        ArgumentError: a format that there is not.
        CacheBindingError: a cache is not laid out so.
    """
    width = q.shape[2]
    check_format("forward_mqa", "kv_cache_dtype", kv_cache_dtype, KV_FORMATS)
    check_cache("forward_mqa", "swa_cache", swa_cache, kv_cache_dtype, width, rope_dims)
    if kv_cache is not None:
        check_cache("forward_mqa", "kv_cache", kv_cache, kv_cache_dtype, width, rope_dims)
    live = token_to_req >= 0
    completed = torch.where(live, (positions + 1) // ratio, 0) if ratio else None
    ids = _compressed_ids(topk_indices, completed, q.shape[0])
    for rows in _token_slices(q.shape[0], width * (window + (0 if ids is None else ids.shape[1]))):
        requests = token_to_req[rows].unsqueeze(1)
        recent = positions[rows].unsqueeze(1) + torch.arange(1 - window, 1, device=q.device)
        slots = locate(swa_block_table, requests, recent, swa_cache.shape[1])
        keys = gather_entries(swa_cache, slots, width, kv_cache_dtype, rope_dims)
        if ids is not None and kv_cache is not None and block_table is not None:
            compressed = locate(block_table, requests, ids[rows], kv_cache.shape[1])
            entries = gather_entries(kv_cache, compressed, width, kv_cache_dtype, rope_dims)
            keys = torch.cat([keys, entries], dim=1)
            slots = torch.cat([slots, compressed], dim=1)
        attended = _attend(q[rows], keys, slots >= 0, attn_sink, scale)
        out[rows] = torch.where(live[rows, None, None], attended, 0).to(out.dtype)


def _compressed_ids(topk_indices: Tensor | None, completed: Tensor | None, num_tokens: int) -> Tensor | None:
    """Block ids each token attends to, -1 to skip: [T, n]; None if there are none at all."""
    if topk_indices is not None:
        return topk_indices[:num_tokens]
    if completed is None or num_tokens == 0:
        return None
    ids = torch.arange(int(completed.max()), device=completed.device)
    return torch.where(ids < completed.unsqueeze(1), ids, -1)


def _token_slices(num_tokens: int, elements_per_token: int) -> Iterator[slice]:
    step = max(_GATHER_BUDGET // elements_per_token, 1)
    for start in range(0, num_tokens, step):
        yield slice(start, start + step)


def _attend(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Softmax attention of q [t, H, D] over keys [t, n, D] where valid [t, n]: fp32 [t, H, D]."""
    keys = keys.float()
    logits = (q.float() @ keys.transpose(1, 2)) * scale
    logits = logits.masked_fill(~valid.unsqueeze(1), float("-inf"))
    sinks = sink.float().reshape(1, -1, 1).expand(q.shape[0], -1, -1)
    weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]
    return weights @ keys


define_op(
    SCHEMA,
    forward_mqa,
    role="split",
    step_state=("token_to_req", "swa_block_table", "block_table"),
    tokens="q",
    kernels_capturable="decode",
)
