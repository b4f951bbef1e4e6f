"""`dsv4::sparse_indexer`: which compressed entries each token attends to. A split op: it decides on the host.

When every token of the step has at most K completed blocks, all are selected and nothing is scored. That choice
depends on the lengths of this step alone, so it must never be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._library import define_op
from ._paging import locate, read_rows

SCHEMA = (
    "sparse_indexer(Tensor index_q, Tensor? index_q_scale, Tensor index_weights, Tensor positions, Tensor k_cache, "
    "Tensor token_to_req, Tensor block_table, int ratio, Tensor(a!) topk_indices) -> ()"
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
) -> None:
    """Write the top-k completed blocks of each token, by sum over heads of weight * relu(q . k).

    Args:
        index_q: [T, heads, width], rotated.
        index_q_scale: None; a place for quantised queries.
        index_weights: [T, heads], scaled.
        positions: [T] int64; a token sees the blocks b < (position + 1) // ratio.
        k_cache: [num_blocks, block_size, width].
        token_to_req: [T] int32, -1 for padding.
        block_table: [B, n] int32, blocks of `k_cache`; entries of a block of -1 are never selected.
        ratio: tokens of a compressed block.
        topk_indices: [max_tokens, K] int32; rows [0, T) are written: block ids within the request in no
            particular order, then -1. Padded tokens have -1 only.

    Raises:
        RunnerError: more tokens than rows of `topk_indices`.
        UnsupportedConfigError: quantised queries.
    """
    _check(index_q, index_q_scale, topk_indices)
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
            keys = read_rows(k_cache, slots).float()
            for some in _split_tokens(tokens, index_q.shape[1] * max(keys.shape[0], 1)):
                scores = _score(index_q[some], index_weights[some], keys)
                visible = (ids < completed[some].unsqueeze(1)) & (slots >= 0)
                selected[some] = _select_best(scores, visible, selected.shape[1])


def _check(index_q: Tensor, index_q_scale: Tensor | None, topk_indices: Tensor) -> None:
    if index_q_scale is not None:
        from ..errors import UnsupportedConfigError

        raise UnsupportedConfigError("sparse_indexer: quantised queries are not supported; index_q_scale must be None")
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
    selected.copy_(torch.where(slots >= 0, ids, -1))


def _split_tokens(tokens: Tensor, elements_per_token: int) -> Iterator[Tensor]:
    yield from tokens.split(max(_SCORE_BUDGET // elements_per_token, 1))


def _score(index_q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    products = torch.relu(index_q.float() @ keys.T)
    return (weights.float().unsqueeze(1) @ products).squeeze(1)


def _select_best(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Block ids of the best scores among the visible ones, -1 padded: int32 [tokens, count]."""
    scores = scores.masked_fill(~visible, float("-inf"))
    best = scores.topk(min(count, scores.shape[1]), dim=1).indices
    best = torch.where(visible.gather(1, best), best, -1).to(torch.int32)
    return torch.nn.functional.pad(best, (0, count - best.shape[1]), value=-1)


define_op(SCHEMA, sparse_indexer, role="split", step_state=("token_to_req", "block_table"), tokens="index_q")
