"""`dsv4::compress_kv_insert`: keep the states of tokens, and where a token closes a block, write its compressed entry.

The state of a token is (kv, score + ape) in fp32. An entry pools the states of its block, for ratio 4 also those of
the block before (other channels), with a softmax over tokens per channel; then norm and RoPE at the first position of
the block. Which tokens close a block is known on the device only, so they are compacted into a fixed capacity: of T
tokens of at most B requests, at most T // ratio + B can close one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import define_op
from ._math import rms_normalise, rotate
from ._paging import locate, read_rows, write_rows
from .cache_formats import INDEX_FORMATS, KV_FORMATS, check_cache, check_format, insert_entries

SCHEMA = (
    "compress_kv_insert(Tensor kv_score, Tensor ape, Tensor norm_weight, Tensor positions, Tensor cos_sin, "
    "Tensor token_to_req, Tensor state_block_table, Tensor state_slot_mapping, Tensor slot_mapping, int ratio, "
    'float eps, Tensor(a!) state_cache, Tensor(b!) kv_cache, str kv_cache_dtype="auto") -> ()'
)

_FORMATS = tuple(dict.fromkeys((*KV_FORMATS, *INDEX_FORMATS)))


def compress_kv_insert(
    kv_score: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    token_to_req: Tensor,
    state_block_table: Tensor,
    state_slot_mapping: Tensor,
    slot_mapping: Tensor,
    ratio: int,
    eps: float,
    state_cache: Tensor,
    kv_cache: Tensor,
    kv_cache_dtype: str = "auto",
) -> None:
    """Store all states of the step, then pool the blocks that its tokens close.

    Args:
        kv_score: [T, 2 * o * D], kv then score, o = 2 for ratio 4 and 1 otherwise; D as of `norm_weight`.
        ape: [ratio, o * D], added to the score by position within the block.
        norm_weight: [D].
        positions: [T] int64.
        cos_sin: fp32 [max_pos, rd].
        token_to_req: [T] int32.
        state_block_table: [B, n] int32, blocks of `state_cache`.
        state_slot_mapping: [T] int64, slots of `state_cache`; -1 stores nothing.
        slot_mapping: [T] int64, slots of `kv_cache`; -1 where the token closes no block.
        ratio: tokens of a block.
        eps: added to the mean square.
        state_cache: [num_blocks, block_size, 2 * o * D] fp32, written.
        kv_cache: [num_blocks, block_size, D], or bytes of a packed format, written.
        kv_cache_dtype: "auto": rows in the dtype of the cache; or "fp8_ds_mla", or "fp8" or "mxfp4" for keys of the
            indexer.

    Raises:
        TypeError: the state cache is not fp32 (a model cast after its caches were bound casts them too).
        ArgumentError: a format that there is not.
        CacheBindingError: the cache is not laid out so.
    """
    rope_dims = cos_sin.shape[-1]
    check_format("compress_kv_insert", "kv_cache_dtype", kv_cache_dtype, _FORMATS)
    check_cache("compress_kv_insert", "kv_cache", kv_cache, kv_cache_dtype, norm_weight.shape[0], rope_dims)
    if state_cache.dtype is not torch.float32:
        raise TypeError(f"compress_kv_insert: state_cache is {state_cache.dtype}; bind caches after casting the model")
    if positions.shape[0] == 0:
        return
    _save_states(kv_score, ape, positions, state_slot_mapping, ratio, state_cache)
    tokens = _closing_tokens(slot_mapping, positions.shape[0] // ratio + state_block_table.shape[0])
    rows = tokens.clamp(min=0)
    # rows past the last closing token pool the window of token 0 and are written nowhere
    kv, score = _gather_window(state_cache, state_block_table, token_to_req[rows], positions[rows], ratio)
    pooled = (torch.softmax(score, dim=1) * kv).sum(dim=1)
    normed = rms_normalise(pooled, eps) * norm_weight.float()
    entries = rotate(normed, cos_sin[positions[rows] // ratio * ratio])
    slots = torch.where(tokens >= 0, slot_mapping[rows], -1)
    insert_entries(kv_cache, slots, entries, kv_cache_dtype, rope_dims)


def _save_states(
    kv_score: Tensor, ape: Tensor, positions: Tensor, slots: Tensor, ratio: int, state_cache: Tensor
) -> None:
    kv, score = kv_score.float().chunk(2, dim=-1)
    write_rows(state_cache, slots, torch.cat([kv, score + ape.float()[positions % ratio]], dim=-1))


def _closing_tokens(slot_mapping: Tensor, capacity: int) -> Tensor:
    """The tokens that close a block, in order, padded with -1: [capacity] int64."""
    closing = slot_mapping >= 0
    tokens = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    # element 0 takes all the others, so a count above the capacity is an index error and not a lost row
    place = torch.where(closing, closing.cumsum(0), 0)
    return tokens.new_full((capacity + 1,), -1).scatter_(0, place, tokens)[1:]


def _gather_window(
    state_cache: Tensor, block_table: Tensor, requests: Tensor, positions: Tensor, ratio: int
) -> tuple[Tensor, Tensor]:
    """kv and score [C, o * ratio, D] of the tokens that each entry pools; score is -inf before the first token."""
    overlap = 2 if ratio == 4 else 1
    window = positions.unsqueeze(1) + torch.arange(1 - overlap * ratio, 1, device=positions.device)
    slots = locate(block_table, requests.unsqueeze(1), window, state_cache.shape[1])
    kv, score = read_rows(state_cache, slots).chunk(2, dim=-1)
    score = torch.where((slots >= 0).unsqueeze(-1), score, float("-inf"))
    return (_take_halves(kv, ratio), _take_halves(score, ratio)) if overlap == 2 else (kv, score)


def _take_halves(x: Tensor, ratio: int) -> Tensor:
    """Tokens of the previous block use the first half of the channels, those of the block itself the second."""
    previous, own = x.chunk(2, dim=-1)
    return torch.cat([previous[:, :ratio], own[:, ratio:]], dim=1)


define_op(
    SCHEMA,
    compress_kv_insert,
    role="prepare",
    step_state=("token_to_req", "state_block_table", "state_slot_mapping", "slot_mapping"),
)
