"""Triton kernels of `dsv4::compress_kv_insert`: `save_states`, then `pool_blocks` for tokens that close a block.

The second launch reads what the first one wrote. Both have a program for each token; one whose slot is -1 ends at once,
so which tokens close a block is decided on the device and no launch depends on it. States are pooled some tokens at a
time, by a running softmax in each channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_formats import INDEX_FORMATS, KV_FORMATS, PLAIN
from ._device import normalise, rotate
from ._packing import store_entry
from .checks import (
    FLOATS,
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

TOKENS_AT_ONCE = 8
FORMATS = (*KV_FORMATS, *INDEX_FORMATS)


@triton.jit(do_not_specialize_on_alignment=["positions", "state_slot_mapping"])
def save_states(
    kv_score,
    ape,
    positions,
    state_slot_mapping,
    state_cache,
    state_page,
    CHANNELS: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_ROWS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_slot_mapping + token).to(tl.int64)
    if slot >= 0:
        channel = tl.arange(0, CHANNELS)
        given = kv_score + token * 2 * CHANNELS + channel
        start = state_cache + (slot // STATE_ROWS * state_page + slot % STATE_ROWS * 2 * CHANNELS) + channel
        bias = tl.load(ape + tl.load(positions + token) % RATIO * CHANNELS + channel).to(tl.float32)
        tl.store(start, tl.load(given).to(tl.float32))
        tl.store(start + CHANNELS, tl.load(given + CHANNELS).to(tl.float32) + bias)


@triton.jit(
    do_not_specialize=["state_columns"],
    do_not_specialize_on_alignment=["norm_weight", "positions", "token_to_req", "state_table", "slot_mapping"],
)
def pool_blocks(
    norm_weight,
    positions,
    cos_sin,
    token_to_req,
    state_table,
    state_columns,
    slot_mapping,
    eps,
    state_cache,
    state_page,
    kv_cache,
    page,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
    RATIO: tl.constexpr,
    ROPE: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        position = tl.load(positions + token)
        request = tl.load(token_to_req + token).to(tl.int64)
        table_row = state_table + request * state_columns
        channel = tl.arange(0, WIDTH)
        best = tl.full((WIDTH,), float("-inf"), tl.float32)
        total = tl.zeros((WIDTH,), tl.float32)
        pooled = tl.zeros((WIDTH,), tl.float32)
        for first in range(0, OVERLAP * RATIO, BLOCK):
            within = first + tl.arange(0, BLOCK)
            at = position - (OVERLAP * RATIO - 1) + within
            column = at // STATE_ROWS
            wanted = (request >= 0) & (at >= 0) & (column < state_columns)
            block = tl.load(table_row + column, mask=wanted, other=-1).to(tl.int64)
            there = (block >= 0)[:, None]
            # of the block before, the first half of the channels; of the block itself, the second
            half = tl.where(within >= RATIO, WIDTH, 0)
            start = block * state_page + at % STATE_ROWS * (2 * OVERLAP * WIDTH) + half
            cells = state_cache + start[:, None] + channel[None, :]
            kv = tl.load(cells, mask=there, other=0.0)
            score = tl.load(cells + OVERLAP * WIDTH, mask=there, other=float("-inf"))
            new_best = tl.maximum(best, tl.max(score, 0))
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
            weight = tl.exp(score - shift[None, :])
            fade = tl.exp(best - shift)
            total = total * fade + tl.sum(weight, 0)
            pooled = pooled * fade + tl.sum(weight * kv, 0)
            best = new_best
        weight = tl.load(norm_weight + channel).to(tl.float32)[None, :]
        normed = normalise((pooled / total)[None, :], eps, WIDTH) * weight
        entry = rotate(normed, cos_sin + position // RATIO * RATIO * ROPE, False, 1, WIDTH, ROPE)
        store_entry(kv_cache, slot, page, entry, FORMAT, ROWS, WIDTH, ROPE)


@dataclass(frozen=True, slots=True)
class CompressKvInsertCall:
    """The arguments of `dsv4::compress_kv_insert`, as its schema has them."""

    kv_score: Tensor
    ape: Tensor
    norm_weight: Tensor
    positions: Tensor
    cos_sin: Tensor
    token_to_req: Tensor
    state_block_table: Tensor
    state_slot_mapping: Tensor
    slot_mapping: Tensor
    ratio: int
    eps: float
    state_cache: Tensor
    kv_cache: Tensor
    kv_cache_dtype: str = PLAIN

    def why_not(self) -> str | None:
        """Why no kernel fits, None if one does."""
        width = self.norm_weight.shape[0]
        numbers = {"kv_score": self.kv_score, "ape": self.ape, "norm_weight": self.norm_weight}
        return first_reason(
            no_architecture(self.kv_score.device),
            not_a(FLOATS, **numbers),
            not_a((torch.float32,), state_cache=self.state_cache),
            not_power_of_two(head_dim=width),
            not_laid_out(PLAIN, (PLAIN,), 2 * self.ape.shape[1], 0, state_cache=self.state_cache),
            not_packable(self.kv_cache_dtype, width),
            not_laid_out(self.kv_cache_dtype, FORMATS, width, self.cos_sin.shape[1], kv_cache=self.kv_cache),
            None if self.kv_cache_dtype != PLAIN else not_a(FLOATS, kv_cache=self.kv_cache),
            not_rows(
                self.kv_score.shape[0],
                positions=self.positions,
                token_to_req=self.token_to_req,
                state_slot_mapping=self.state_slot_mapping,
                slot_mapping=self.slot_mapping,
            ),
            not_contiguous(
                **numbers,
                positions=self.positions,
                cos_sin=self.cos_sin,
                token_to_req=self.token_to_req,
                state_block_table=self.state_block_table,
                state_slot_mapping=self.state_slot_mapping,
                slot_mapping=self.slot_mapping,
            ),
        )

    def launches(self, architecture: str | None = None) -> Iterator[KernelLaunch]:
        """What is launched, the same for every architecture."""
        tokens, width, channels = self.positions.shape[0], self.norm_weight.shape[0], self.ape.shape[1]
        sizes = {"RATIO": self.ratio, "STATE_ROWS": self.state_cache.shape[1]}
        states = (self.state_cache, self.state_cache.stride(0))
        yield KernelLaunch(
            kernel=save_states,
            grid=(tokens,),
            arguments=(self.kv_score, self.ape, self.positions, self.state_slot_mapping, *states),
            constants=sizes | {"CHANNELS": channels},
        )
        yield KernelLaunch(
            kernel=pool_blocks,
            grid=(tokens,),
            arguments=(
                self.norm_weight,
                self.positions,
                self.cos_sin,
                self.token_to_req,
                self.state_block_table,
                self.state_block_table.shape[1],
                self.slot_mapping,
                self.eps,
                *states,
                self.kv_cache,
                self.kv_cache.stride(0),
            ),
            constants=sizes
            | {
                "WIDTH": width,
                "OVERLAP": channels // width,
                "ROPE": self.cos_sin.shape[1],
                "ROWS": self.kv_cache.shape[1],
                "FORMAT": self.kv_cache_dtype,
                "BLOCK": TOKENS_AT_ONCE,
            },
            warps=2 if width <= 128 else 4,
        )
