"""Scratch of the kernels: how much they need at most, and how it is laid out.

A model hands scratch to the split ops as an argument that they write, so that the effects show it and no stream or
layer can write another's. The sizes depend on no step and on no token count: work is split only as long as there are
few programs, and scores are made for as many tokens at once as there is room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .serve import KERNELS_SERVE
from .table import PROGRAMS

MOST_HEADS = 64  # of a program
SCORES = 1 << 24  # scores of the indexer at once (64 MiB)


def mqa_scratch(q: Tensor) -> Tensor | None:
    """Scratch for `dsv4::forward_mqa` with queries q [T, H, D]; None where no kernel serves it."""
    if q.device.type != "cuda" or not KERNELS_SERVE:
        return None
    return q.new_empty(partials_size(1, PROGRAMS * MOST_HEADS, q.shape[2]), dtype=torch.float32)


def indexer_scratch(topk_indices: Tensor) -> Tensor | None:
    """Scratch for `dsv4::sparse_indexer` that fills `topk_indices`; None where no kernel serves it."""
    if topk_indices.device.type != "cuda" or not KERNELS_SERVE:
        return None
    return topk_indices.new_empty(SCORES, dtype=torch.int32)


def partials_size(tokens: int, rows: int, width: int) -> int:
    """Elements of fp32 partials: a sum [width], the greatest logit and the denominator for each row of a token."""
    return tokens * rows * (width + 2)


def carve_partials(scratch: Tensor | None, out: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three fp32 partials of `out` [T, H, D] in scratch, [T * splits * H, ...] each; unused without a split.

    Args:
        scratch: fp32, of any size; memory of its own is allocated if it is None or too small.
        out: [T, H, D].
        splits: shares of a token.
    """
    tokens, heads, width = out.shape
    rows = tokens * splits * heads
    if splits == 1:
        nothing = out.new_empty(0, dtype=torch.float32)
        return nothing, nothing, nothing
    size = partials_size(tokens, splits * heads, width)
    if scratch is None or scratch.numel() < size:
        scratch = out.new_empty(size, dtype=torch.float32)
    summed, best, total, _ = scratch.view(-1).split([rows * width, rows, rows, scratch.numel() - size])
    return summed, best, total
