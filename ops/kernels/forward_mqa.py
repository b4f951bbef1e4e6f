"""Triton kernel of `dsv4::forward_mqa` for bf16 and fp8_ds_mla caches: split over keys, then combined.

The keys of a token are numbered: first its window, then its compressed entries. One program takes a token, a block of
heads and one of SPLITS equal shares of the tiles of keys; how many tiles there are is read on the device, so the grid
is the same in every step. With one split the program finishes its rows; with more it leaves fp32 partials (what it
summed, the greatest logit and the denominator), and `combine_splits` adds them up, with the sink.

Rows that no valid index names are never loaded, so they may hold anything. Logits and sums are fp32; the weights are
rounded to bf16 before they meet the values, as FlashMLA does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_formats import KV_FORMATS, PLAIN
from ._packing import MLA_SCALES, load_mla_keys
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
from .scratch import carve_partials
from .table import ATTENTION, HAVE_E4M3, architecture_for, choose_splits, row_for

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_tile(q, keys, there, scale, summed, best, total):
    """Fold a tile of keys [n, WIDTH] into the running softmax of q [heads, WIDTH]; logits are powers of two."""
    logits = tl.dot(q, tl.trans(keys)) * scale
    logits = tl.where(there[None, :], logits, float("-inf"))
    new_best = tl.maximum(best, tl.max(logits, 1))
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # no key so far: keep -inf - -inf out
    weights = tl.exp2(logits - shift[:, None])
    fade = tl.exp2(best - shift)
    summed = tl.dot(weights.to(keys.dtype), keys, summed * fade[:, None])
    return summed, new_best, total * fade + tl.sum(weights, 1)


@triton.jit(
    do_not_specialize=["swa_columns", "columns"],
    do_not_specialize_on_alignment=[
        *("attn_sink", "positions", "token_to_req", "swa_table", "table", "topk", "partial_best", "partial_total")
    ],
)
def attend(
    q,
    attn_sink,
    positions,
    token_to_req,
    swa_cache,
    swa_table,
    swa_columns,
    swa_page,
    kv_cache,
    table,
    columns,
    kv_page,
    topk,
    scale,
    out,
    partial_sum,
    partial_best,
    partial_total,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    SWA_ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    width = tl.arange(0, WIDTH)
    request = tl.load(token_to_req + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)

    # keys of the window, then compressed entries; a padded token has none of either
    first = tl.maximum(position - (WINDOW - 1), 0)
    in_window = position - first + 1
    keys_there = in_window
    if RATIO > 0:
        if TOPK > 0:
            place = tl.arange(0, TOPK_BLOCK)
            named = tl.load(topk + token * TOPK + place, mask=place < TOPK, other=-1) >= 0
            keys_there += tl.max(tl.where(named, place + 1, 0), 0)
        else:
            keys_there += (position + 1) // RATIO
    keys_there = tl.where(request >= 0, keys_there, 0)
    tiles = tl.cdiv(keys_there, BLOCK_N)
    share = tl.cdiv(tiles, SPLITS)
    begin = tl.minimum(split * share, tiles)
    end = tl.minimum(begin + share, tiles)

    queries = tl.load(q + (token * HEADS + heads[:, None]) * WIDTH + width[None, :], mask=is_head[:, None], other=0.0)
    # the sink is where the softmax begins: a first logit, of weight 1, with no value
    sink = tl.load(attn_sink + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2E
    best = tl.where(split == 0, sink, float("-inf"))
    total = tl.where(best > float("-inf"), 1.0, 0.0)
    summed = tl.zeros((BLOCK_H, WIDTH), tl.float32)
    scale = scale * LOG2E
    swa_row = swa_table + request * swa_columns
    table_row = table + request * columns
    for tile in range(begin, end):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        recent = key < in_window
        wanted = key < keys_there
        index = first + key
        column = index // SWA_ROWS
        row = index % SWA_ROWS
        if RATIO > 0:
            index = key - in_window
            if TOPK > 0:
                index = tl.load(topk + token * TOPK + index, mask=wanted & (index >= 0), other=-1)
            wanted = wanted & (recent | (index >= 0))
            column = tl.where(recent, column, index // KV_ROWS)
            row = tl.where(recent, row, index % KV_ROWS)
            wanted = wanted & (column < tl.where(recent, swa_columns, columns))
            block = tl.load(tl.where(recent, swa_row, table_row) + column, mask=wanted, other=-1)
            start = tl.where(recent, swa_cache, kv_cache) + block.to(tl.int64) * tl.where(recent, swa_page, kv_page)
            rows = tl.where(recent, SWA_ROWS, KV_ROWS)
        else:
            wanted = wanted & (column < swa_columns)
            block = tl.load(swa_row + column, mask=wanted, other=-1)
            start = swa_cache + block.to(tl.int64) * swa_page
            rows = SWA_ROWS
        there = block >= 0
        if FORMAT == "fp8_ds_mla":
            scales = start + rows * (WIDTH + ROPE) + row * MLA_SCALES
            start += row * (WIDTH + ROPE)
            keys = load_mla_keys(start, scales, there, NATIVE, BLOCK_N, WIDTH, ROPE)
        else:
            keys = tl.load((start + row * WIDTH)[:, None] + width[None, :], mask=there[:, None], other=0.0)
        summed, best, total = attend_tile(queries, keys, there, scale, summed, best, total)

    # `split` is 0 if SPLITS is 1, which the compiler cannot know: the offsets of q would stay in registers otherwise
    results = (token * SPLITS + split) * HEADS + heads
    cells = results[:, None] * WIDTH + width[None, :]
    if SPLITS == 1:
        result = summed * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        tl.store(out + cells, result.to(out.dtype.element_ty), mask=is_head[:, None])
    else:
        tl.store(partial_sum + cells, summed, mask=is_head[:, None])
        tl.store(partial_best + results, best, mask=is_head)
        tl.store(partial_total + results, total, mask=is_head)


@triton.jit(do_not_specialize_on_alignment=["partial_best", "partial_total"])
def combine_splits(
    partial_sum, partial_best, partial_total, out, HEADS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    """Add up the shares of one token and head; a share without keys has weight 0, and the first one has the sink."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    width = tl.arange(0, WIDTH)
    rows = (token * SPLITS + tl.arange(0, SPLITS)) * HEADS + head
    best = tl.load(partial_best + rows)
    shift = tl.max(best, 0)
    weight = tl.exp2(best - tl.where(shift == float("-inf"), 0.0, shift))
    total = tl.sum(tl.load(partial_total + rows) * weight, 0)
    shares = tl.load(partial_sum + rows[:, None] * WIDTH + width[None, :])
    result = tl.sum(shares * weight[:, None], 0) * (1.0 / tl.where(total > 0, total, 1.0))
    tl.store(out + (token * HEADS + head) * WIDTH + width, result.to(out.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class ForwardMqaCall:
    """The arguments of `dsv4::forward_mqa`, as its schema has them."""

    q: Tensor
    attn_sink: Tensor
    positions: Tensor
    token_to_req: Tensor
    swa_cache: Tensor
    swa_block_table: Tensor
    kv_cache: Tensor | None
    block_table: Tensor | None
    topk_indices: Tensor | None
    window: int
    ratio: int
    scale: float
    out: Tensor
    kv_cache_dtype: str = PLAIN
    rope_dims: int = 64
    scratch: Tensor | None = None

    def why_not(self) -> str | None:
        """Why no kernel fits, None if one does."""
        caches = {"swa_cache": self.swa_cache, "kv_cache": self.kv_cache}
        return first_reason(
            no_architecture(self.q.device),
            not_a((torch.bfloat16,), q=self.q, out=self.out),
            not_power_of_two(head_dim=self.q.shape[2]),
            not_packable(self.kv_cache_dtype, self.q.shape[2]),
            not_laid_out(self.kv_cache_dtype, KV_FORMATS, self.q.shape[2], self.rope_dims, **caches),
            None if self.kv_cache_dtype != PLAIN else not_a((torch.bfloat16,), **caches),
            not_rows(self.q.shape[0], positions=self.positions, token_to_req=self.token_to_req, out=self.out),
            not_contiguous(
                q=self.q,
                attn_sink=self.attn_sink,
                positions=self.positions,
                token_to_req=self.token_to_req,
                swa_block_table=self.swa_block_table,
                block_table=self.block_table,
                topk_indices=self.topk_indices,
                out=self.out,
            ),
        )

    def launches(self, architecture: str | None = None) -> Iterator[KernelLaunch]:
        """What is launched, for the architecture of the device unless another one is named."""
        tokens, heads, width = self.q.shape
        architecture = architecture_for(self.q.device, architecture)
        tile = row_for(ATTENTION, self.q.device, self.kv_cache_dtype, heads, architecture)
        head_blocks = triton.cdiv(heads, tile.heads)
        splits = choose_splits(tokens * head_blocks, triton.cdiv(self.most_keys(), tile.keys))
        partials = carve_partials(self.scratch, self.out, splits)
        yield KernelLaunch(
            kernel=attend,
            grid=(tokens, head_blocks, splits),
            arguments=(*self._inputs(), *partials),
            constants={
                "HEADS": heads,
                "WIDTH": width,
                "WINDOW": self.window,
                "RATIO": self.ratio,
                "TOPK": self.selected(),
                "TOPK_BLOCK": triton.next_power_of_2(self.selected()),
                "SWA_ROWS": self.swa_cache.shape[1],
                "KV_ROWS": 1 if self.kv_cache is None else self.kv_cache.shape[1],
                "SPLITS": splits,
                "FORMAT": self.kv_cache_dtype,
                "NATIVE": architecture in HAVE_E4M3,
                "ROPE": self.rope_dims,
                "BLOCK_H": tile.heads,
                "BLOCK_N": tile.keys,
            },
            warps=tile.warps,
            stages=tile.stages,
            spills=tile.spills,
        )
        if splits > 1:
            sizes = {"HEADS": heads, "WIDTH": width, "SPLITS": splits}
            yield KernelLaunch(
                kernel=combine_splits, grid=(tokens, heads), arguments=(*partials, self.out), constants=sizes
            )

    def selected(self) -> int:
        """Entries that the indexer selects for a token, 0 if all completed ones are attended to."""
        return 0 if self.topk_indices is None else self.topk_indices.shape[1]

    def most_keys(self) -> int:
        """The most keys that a token can have, by the sizes of tables."""
        if self.kv_cache is None or self.block_table is None:
            return self.window
        return self.window + (self.selected() or self.block_table.shape[1] * self.kv_cache.shape[1])

    def _inputs(self) -> tuple[Tensor | int | float, ...]:
        # what a layer does not have is never read; a pointer of the right type stands for it
        kv_cache = self.swa_cache if self.kv_cache is None else self.kv_cache
        table = self.swa_block_table if self.block_table is None else self.block_table
        return (
            self.q,
            self.attn_sink,
            self.positions,
            self.token_to_req,
            self.swa_cache,
            self.swa_block_table,
            self.swa_block_table.shape[1],
            self.swa_cache.stride(0),
            kv_cache,
            table,
            table.shape[1],
            kv_cache.stride(0),
            self.token_to_req if self.topk_indices is None else self.topk_indices,
            self.scale,
            self.out,
        )
