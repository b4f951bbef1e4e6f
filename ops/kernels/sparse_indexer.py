"""Triton kernels of `dsv4::sparse_indexer` for bf16, fp8 and mxfp4 keys: `score_blocks`, then `select_best`.

Scores go through scratch as integers in the order of the scores, a block that is not there as the least of all. A
program of `select_best` finds the K-th largest of a token's scores by radix, eight bits at a time from the top. Then it
writes in one ascending pass what is greater, and as many of the equal ones as are left: so of equal scores the lower
block id wins, and rows are ascending (see the note "ties" of the op).

A token with at most K completed blocks selects all of them, and none of its keys is read. That is decided on the
device, for each token: the launches are the same for every step.

Where scratch is too small for the scores of all tokens, both kernels are launched for some tokens after the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_formats import FP8, INDEX_FORMATS, PLAIN, query_width, why_not_queries
from ._packing import MXFP4_SCALES, load_e4m3, load_mxfp4
from .checks import (
    first_reason,
    no_architecture,
    not_a,
    not_contiguous,
    not_laid_out,
    not_packable,
    not_power_of_two,
    not_rows,
)
from .launch import KernelLaunch
from .table import HAVE_E4M3, INDEXER, PROGRAMS, architecture_for, row_for

NOT_THERE = tl.constexpr(-(2**31))
SELECT_BLOCK = 2048  # scores that a program of select_best looks at together
SELECT_WARPS = 8


@triton.jit
def in_order(score):
    """fp32 as int32 of the same order; 0.0 and -0.0 are one, NaN is the greatest, nothing is NOT_THERE."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score != score, 0x7FFFFFFF, ordered)


@triton.jit(
    do_not_specialize=["first", "columns"],
    do_not_specialize_on_alignment=["index_q_scale", "index_weights", "positions", "token_to_req", "table"],
)
def score_blocks(
    index_q,
    index_q_scale,
    index_weights,
    positions,
    token_to_req,
    k_cache,
    page,
    table,
    columns,
    scores,
    first,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = first + tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    width = tl.arange(0, WIDTH)
    request = tl.load(token_to_req + token).to(tl.int64)
    completed = (tl.load(positions + token).to(tl.int32) + 1) // RATIO
    completed = tl.where((request >= 0) & (completed > TOPK), completed, 0)
    head_row = token * HEADS + heads
    if FORMAT == "auto":
        queries = tl.load(
            index_q + head_row[:, None] * WIDTH + width[None, :], mask=(heads < HEADS)[:, None], other=0.0
        )
    elif FORMAT == "fp8":
        queries = load_e4m3(index_q + head_row * WIDTH, heads < HEADS, NATIVE, WIDTH)
    else:
        scales = index_q_scale + head_row * MXFP4_SCALES
        queries = load_mxfp4(index_q + head_row * (WIDTH // 2), scales, heads < HEADS, BLOCK_H, WIDTH)
    weights = tl.load(index_weights + token * HEADS + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
    table_row = table + request * columns
    scores_row = scores + tl.program_id(0).to(tl.int64) * columns * ROWS
    for tile in range(tl.program_id(1), tl.cdiv(completed, BLOCK_N), tl.num_programs(1)):
        entry = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        column = entry // ROWS
        block = tl.load(table_row + column, mask=(entry < completed) & (column < columns), other=-1)
        there = block >= 0
        start = k_cache + block.to(tl.int64) * page
        row = entry % ROWS
        if FORMAT == "auto":
            keys = tl.load((start + row * WIDTH)[:, None] + width[None, :], mask=there[:, None], other=0.0)
        elif FORMAT == "fp8":
            keys = load_e4m3(start + row * WIDTH, there, NATIVE, WIDTH)
        else:
            scales = start + ROWS * (WIDTH // 2) + row * MXFP4_SCALES
            keys = load_mxfp4(start + row * (WIDTH // 2), scales, there, BLOCK_N, WIDTH)
        products = tl.dot(queries, tl.trans(keys))
        products = tl.where(products < 0, 0.0, products)  # keeps NaN, as torch.relu does
        score = tl.sum(products * weights[:, None], 0)
        if FORMAT == "fp8":
            # one scale for all values of a key, of which none is negative: it may as well come last
            score *= tl.load((start + ROWS * WIDTH).to(tl.pointer_type(tl.float32)) + row, mask=there, other=0.0)
        score = in_order(score)
        tl.store(scores_row + entry, tl.where(there, score, NOT_THERE), mask=entry < completed)


@triton.jit
def append(topk_row, count, entry, take):
    """Write the entries that are taken behind the `count` that are there; how many there are then."""
    taken = take.to(tl.int32)
    tl.store(topk_row + count + tl.cumsum(taken, 0) - 1, entry, mask=take)
    return count + tl.sum(taken, 0)


@triton.jit(
    do_not_specialize=["first", "columns"],
    do_not_specialize_on_alignment=["positions", "token_to_req", "table", "topk"],
)
def select_best(
    scores,
    positions,
    token_to_req,
    table,
    columns,
    topk,
    first,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = first + tl.program_id(0).to(tl.int64)
    request = tl.load(token_to_req + token).to(tl.int64)
    completed = (tl.load(positions + token).to(tl.int32) + 1) // RATIO
    completed = tl.where(request >= 0, completed, 0)
    table_row = table + request * columns
    topk_row = topk + token * TOPK
    scores_row = scores + tl.program_id(0).to(tl.int64) * columns * ROWS
    count = 0
    if completed <= TOPK:
        for start in range(0, completed, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            column = entry // ROWS
            block = tl.load(table_row + column, mask=(entry < completed) & (column < columns), other=-1)
            count = append(topk_row, count, entry, block >= 0)
    else:
        # the K-th largest score, digit by digit; of those that equal it, `wanted` are taken
        prefix = 0
        decided = 0
        wanted = TOPK
        for digit in range(4):
            shift = 24 - 8 * digit
            seen = tl.zeros((256,), tl.int32)
            for start in range(0, completed, BLOCK):
                entry = start + tl.arange(0, BLOCK)
                key = tl.load(scores_row + entry, mask=entry < completed, other=NOT_THERE) ^ NOT_THERE
                same = (entry < completed) & ((key & decided) == prefix)
                seen += tl.histogram((key >> shift) & 255, 256, mask=same)
            above = tl.sum(seen, 0) - tl.cumsum(seen, 0)
            value = tl.arange(0, 256)
            chosen = tl.min(tl.where(above < wanted, value, 255), 0)
            wanted -= tl.sum(tl.where(value == chosen, above, 0), 0)
            prefix = prefix | (chosen << shift)
            decided = decided | (255 << shift)
        least = prefix ^ NOT_THERE
        tied = 0
        for start in range(0, completed, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            key = tl.load(scores_row + entry, mask=entry < completed, other=NOT_THERE)
            equal = ((key == least) & (key != NOT_THERE)).to(tl.int32)
            rank = tied + tl.cumsum(equal, 0)
            count = append(topk_row, count, entry, (key > least) | ((equal > 0) & (rank <= wanted)))
            tied += tl.sum(equal, 0)
    place = tl.arange(0, TOPK_BLOCK)
    tl.store(topk_row + place, -1, mask=(place >= count) & (place < TOPK))


@dataclass(frozen=True, slots=True)
class SparseIndexerCall:
    """The arguments of `dsv4::sparse_indexer`, as its schema has them."""

    index_q: Tensor
    index_q_scale: Tensor | None
    index_weights: Tensor
    positions: Tensor
    k_cache: Tensor
    token_to_req: Tensor
    block_table: Tensor
    ratio: int
    topk_indices: Tensor
    index_cache_dtype: str = PLAIN
    scratch: Tensor | None = None

    def why_not(self) -> str | None:
        """Why no kernel fits, None if one does."""
        cache_format = self.index_cache_dtype
        width = query_width(self.index_q, cache_format)
        return first_reason(
            no_architecture(self.index_q.device),
            None if self.index_q.shape[0] <= self.topk_indices.shape[0] else "topk_indices has too few rows",
            why_not_queries(self.index_q, self.index_q_scale, cache_format),
            not_power_of_two(index_head_dim=width),
            not_packable(cache_format, width),
            not_laid_out(cache_format, INDEX_FORMATS, width, 0, k_cache=self.k_cache),
            None if cache_format != PLAIN else not_a((torch.bfloat16,), index_q=self.index_q, k_cache=self.k_cache),
            not_rows(
                self.index_q.shape[0],
                index_weights=self.index_weights,
                positions=self.positions,
                token_to_req=self.token_to_req,
            ),
            not_contiguous(
                index_q=self.index_q,
                index_q_scale=self.index_q_scale,
                index_weights=self.index_weights,
                positions=self.positions,
                token_to_req=self.token_to_req,
                block_table=self.block_table,
                topk_indices=self.topk_indices,
            ),
        )

    def launches(self, architecture: str | None = None) -> Iterator[KernelLaunch]:
        """What is launched, for the architecture of the device unless another one is named."""
        tokens, heads, _ = self.index_q.shape
        columns, rows = self.block_table.shape[1], self.k_cache.shape[1]
        architecture = architecture_for(self.index_q.device, architecture)
        tile = row_for(INDEXER, self.index_q.device, self.index_cache_dtype, heads, architecture)
        # as bytes: not every architecture has the type of their codes
        index_q = self.index_q.view(torch.uint8) if self.index_cache_dtype == FP8 else self.index_q
        queries = (index_q, index_q if self.index_q_scale is None else self.index_q_scale)
        scores, tokens_at_once = self._scores(columns * rows)
        step = (self.positions, self.token_to_req)
        selected = self.topk_indices.shape[1]
        sizes = {"RATIO": self.ratio, "TOPK": selected, "ROWS": rows}
        for first in range(0, tokens, tokens_at_once):
            some = min(tokens_at_once, tokens - first)
            shares = min(triton.cdiv(columns * rows, tile.keys), triton.cdiv(4 * PROGRAMS, some))
            keys = (self.k_cache, self.k_cache.stride(0), self.block_table, columns)
            yield KernelLaunch(
                kernel=score_blocks,
                grid=(some, max(shares, 1)),
                arguments=(*queries, self.index_weights, *step, *keys, scores, first),
                constants=sizes
                | {
                    "HEADS": heads,
                    "WIDTH": query_width(self.index_q, self.index_cache_dtype),
                    "FORMAT": self.index_cache_dtype,
                    "NATIVE": architecture in HAVE_E4M3,
                    "BLOCK_H": max(triton.next_power_of_2(heads), 16),
                    "BLOCK_N": tile.keys,
                },
                warps=tile.warps,
                stages=tile.stages,
                spills=tile.spills,
            )
            yield KernelLaunch(
                kernel=select_best,
                grid=(some,),
                arguments=(scores, *step, self.block_table, columns, self.topk_indices, first),
                constants=sizes | {"TOPK_BLOCK": triton.next_power_of_2(selected), "BLOCK": SELECT_BLOCK},
                warps=SELECT_WARPS,
            )

    def _scores(self, most_blocks: int) -> tuple[Tensor, int]:
        """Memory for scores, and for how many tokens there is room in it; there is for one at least."""
        tokens = self.index_q.shape[0]
        if self.scratch is not None and self.scratch.numel() >= most_blocks:
            return self.scratch, min(tokens, self.scratch.numel() // max(most_blocks, 1))
        return self.index_q.new_empty(tokens * most_blocks, dtype=torch.int32), tokens
