"""`dsv4::sparse_indexer`: which compressed entries each token attends to. A split op: in torch it decides on the host.

When every token of the step has at most K completed blocks, all are selected and nothing is scored. That choice
depends on the lengths of this step alone, so it must never be recorded. Kernels make it on the device.

Note "ties": a score is a sum of ReLUs, so with few heads many are exactly 0, and often more than K share the place at
the boundary. The lower block id wins. `torch.topk` has no documented order: it picks others for another length of the
row. Any implementation of this op must keep the rule, and the rows in ascending order, so that what a token attends to,
and the order in which that is summed, depend on its own scores and not on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._library import define_op
from ._paging import locate
from .cache_formats import (
    INDEX_FORMATS,
    check_cache,
    check_format,
    check_queries,
    gather_entries,
    query_width,
    unpack_queries,
)

SCHEMA = (
    "sparse_indexer(Tensor index_q, Tensor? index_q_scale, Tensor index_weights, Tensor positions, Tensor k_cache, "
    "Tensor token_to_req, Tensor block_table, int ratio, Tensor(a!) topk_indices, "
    'str index_cache_dtype="auto", Tensor(b!)? scratch=None) -> ()'
)
# elements of the [tokens, heads, entries] products scored at once (256 MB of fp32)
_SCORE_BUDGET = 1 << 26


def sparse_indexer(
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
    """Write the top-k completed blocks of each token, by sum over heads of weight * relu(q . k); of equal scores the
    lower block id wins (0.0 and -0.0 are equal), see the note "ties".

    Args:
        index_q: [T, heads, width], rotated; in a packed format as `indexer_q_rope` writes them.
        index_q_scale: scales of "mxfp4" queries, None for the other formats.
        index_weights: [T, heads], scaled; for "fp8" queries by their scale too.
        positions: [T] int64; a token sees the blocks b < (position + 1) // ratio.
        k_cache: [num_blocks, block_size, width], or bytes of a packed format.
        token_to_req: [T] int32, -1 for padding.
        block_table: [B, n] int32, blocks of `k_cache`; entries of a block of -1 are never selected.
        ratio: tokens of a compressed block.
        topk_indices: [max_tokens, K] int32; rows [0, T) are written: block ids within the request in ascending order,
            then -1. Padded tokens have -1 only.
        index_cache_dtype: of keys and queries; "auto": rows in the dtype of the cache; or "fp8" or "mxfp4".
        scratch: int32 of any size, whose values mean nothing before and after; kernels on a GPU keep scores in it.

    Raises:
        RunnerError: more tokens than rows of `topk_indices`.
        ArgumentError: a format that there is not, or queries of another one.
        CacheBindingError: the cache is not laid out so.
    """
    check_format("sparse_indexer", "index_cache_dtype", index_cache_dtype, INDEX_FORMATS)
    check_queries("sparse_indexer", "index_q", index_q, index_q_scale, index_cache_dtype)
    width = query_width(index_q, index_cache_dtype)
    check_cache("sparse_indexer", "k_cache", k_cache, index_cache_dtype, width)
    _check_rows(index_q, topk_indices)
    completed = torch.where(token_to_req >= 0, (positions + 1) // ratio, 0)
    selected = topk_indices[: index_q.shape[0]]
    if index_q.shape[0] == 0:
        return
    if int(completed.max()) <= selected.shape[1]:
        _select_all(completed, token_to_req, block_table, k_cache.shape[1], selected)
        return
    selected.fill_(-1)
    for request in token_to_req.unique().tolist():
        if request >= 0:
            tokens = (token_to_req == request).nonzero().squeeze(1)
            ids = torch.arange(int(completed[tokens].max()), device=k_cache.device)
            slots = locate(block_table, torch.full_like(ids, request), ids, k_cache.shape[1])
            keys = gather_entries(k_cache, slots, width, index_cache_dtype).float()
            for some in _split_tokens(tokens, index_q.shape[1] * max(keys.shape[0], 1)):
                scale = None if index_q_scale is None else index_q_scale[some]
                queries = unpack_queries(index_q[some], scale, index_cache_dtype)
                scores = _score(queries, index_weights[some], keys)
                visible = (ids < completed[some].unsqueeze(1)) & (slots >= 0)
                selected[some] = _select_best(scores, visible, selected.shape[1])


def _check_rows(index_q: Tensor, topk_indices: Tensor) -> None:
    if index_q.shape[0] > topk_indices.shape[0]:
        from ..errors import RunnerError

        raise RunnerError(
            f"sparse_indexer: a step of {index_q.shape[0]} tokens, but topk_indices has {topk_indices.shape[0]} rows; "
            "raise max_num_batched_tokens of the model configuration or feed fewer tokens a step"
        )


def _select_all(
    completed: Tensor, token_to_req: Tensor, block_table: Tensor, block_size: int, selected: Tensor
) -> None:
    ids = torch.arange(selected.shape[1], device=selected.device)
    ids = torch.where(ids < completed.unsqueeze(1), ids, -1)
    slots = locate(block_table, token_to_req.unsqueeze(1), ids, block_size)
    selected.copy_(_pack(slots >= 0, selected.shape[1]))


def _split_tokens(tokens: Tensor, elements_per_token: int) -> Iterator[Tensor]:
    yield from tokens.split(max(_SCORE_BUDGET // elements_per_token, 1))


def _score(index_q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    products = torch.relu(index_q @ keys.T)
    return (weights.float().unsqueeze(1) @ products).squeeze(1)


def _select_best(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Block ids of the best scores among the visible ones, -1 padded: int32 [tokens, count]; see the note "ties"."""
    count_here = min(count, scores.shape[1])
    scores = scores.masked_fill(~visible, float("-inf"))
    least = scores.topk(count_here, dim=1).values[:, -1:]
    better = ~(scores <= least)  # NaN too, as in topk
    tied = scores == least
    first = tied.cumsum(1) <= count_here - better.sum(1, keepdim=True)
    return _pack((better | tied & first) & visible, count)


def _pack(chosen: Tensor, count: int) -> Tensor:
    """The first `count` ids that are chosen, ascending, then -1: int32 [tokens, count] of bool [tokens, ids]."""
    place = chosen.cumsum(1) - 1
    place = torch.where(chosen & (place < count), place, count)
    packed = torch.full((chosen.shape[0], count + 1), -1, dtype=torch.int32, device=chosen.device)
    ids = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device).expand_as(chosen)
    return packed.scatter_(1, place, ids)[:, :count]


define_op(
    SCHEMA,
    sparse_indexer,
    role="split",
    step_state=("token_to_req", "block_table"),
    tokens="index_q",
    kernels_capturable="decode",
)
