"""Triton kernel of `dsv4::indexer_q_rope`: one program for all heads of a token, and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache_formats import FP8, PLAIN, why_not_queries
from ._device import rotate
from ._packing import MXFP4_GROUP, MXFP4_SCALES, quantise_e2m1, quantise_e4m3, scale_value
from .checks import (
    FLOATS,
    first_reason,
    no_architecture,
    not_a,
    not_contiguous,
    not_packable,
    not_power_of_two,
    not_rows,
)
from .launch import KernelLaunch


@triton.jit(do_not_specialize_on_alignment=["weights", "positions", "weights_out", "q_scale_out"])
def rotate_queries(
    index_q,
    weights,
    positions,
    cos_sin,
    scale,
    q_out,
    weights_out,
    q_scale_out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    cells = (token * HEADS + heads[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :]
    rows = tl.load(index_q + cells, mask=is_head[:, None], other=0.0).to(tl.float32)
    rows = rotate(rows, cos_sin + tl.load(positions + token) * ROPE, False, BLOCK_H, WIDTH, ROPE)
    weight = tl.load(weights + token * HEADS + heads, mask=is_head, other=0.0).to(tl.float32) * scale
    if FORMAT == "auto":
        tl.store(q_out + cells, rows.to(q_out.dtype.element_ty), mask=is_head[:, None])
    elif FORMAT == "fp8":
        codes, exponent = quantise_e4m3(rows)
        tl.store(q_out + cells, codes.to(tl.uint8), mask=is_head[:, None])
        weight *= scale_value(exponent)
    else:
        GROUPS: tl.constexpr = WIDTH // MXFP4_GROUP
        codes, exponent = quantise_e2m1(tl.reshape(rows, (BLOCK_H * GROUPS, MXFP4_GROUP)), BLOCK_H * GROUPS)
        codes = tl.reshape(codes, (BLOCK_H, WIDTH // 2))
        place = (token * HEADS + heads[:, None]) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        tl.store(q_out + place, codes.to(tl.uint8), mask=is_head[:, None])
        start = q_scale_out + (token * HEADS + heads[:, None]) * MXFP4_SCALES
        group = tl.arange(0, GROUPS)[None, :]
        tl.store(start + group, tl.reshape(exponent, (BLOCK_H, GROUPS)).to(tl.uint8), mask=is_head[:, None])
        if GROUPS < MXFP4_SCALES:
            byte = tl.arange(0, MXFP4_SCALES)[None, :]
            rest = tl.zeros((BLOCK_H, MXFP4_SCALES), tl.uint8)
            tl.store(start + byte, rest, mask=is_head[:, None] & (byte >= GROUPS))
    tl.store(weights_out + token * HEADS + heads, weight.to(weights_out.dtype.element_ty), mask=is_head)


@dataclass(frozen=True, slots=True)
class IndexerQRopeCall:
    """The arguments of `dsv4::indexer_q_rope`, as its schema has them."""

    index_q: Tensor
    weights: Tensor
    positions: Tensor
    cos_sin: Tensor
    scale: float
    q_out: Tensor
    weights_out: Tensor
    q_scale_out: Tensor | None = None
    index_cache_dtype: str = PLAIN

    def why_not(self) -> str | None:
        """Why no kernel fits, None if one does."""
        numbers = {"index_q": self.index_q, "weights": self.weights, "weights_out": self.weights_out}
        return first_reason(
            no_architecture(self.index_q.device),
            why_not_queries(self.q_out, self.q_scale_out, self.index_cache_dtype),
            not_a(FLOATS, **numbers),
            None if self.index_cache_dtype != PLAIN else not_a(FLOATS, q_out=self.q_out),
            not_packable(self.index_cache_dtype, self.index_q.shape[2]),
            not_rows(self.index_q.shape[0], **numbers, positions=self.positions, q_out=self.q_out),
            not_power_of_two(index_head_dim=self.index_q.shape[2]),
            not_contiguous(
                **numbers,
                positions=self.positions,
                cos_sin=self.cos_sin,
                q_out=self.q_out,
                q_scale_out=self.q_scale_out,
            ),
        )

    def launches(self, architecture: str | None = None) -> Iterator[KernelLaunch]:
        """What is launched, the same for every architecture."""
        tokens, heads, width = self.index_q.shape
        # as bytes: not every architecture has the type of their codes
        q_out = self.q_out.view(torch.uint8) if self.index_cache_dtype == FP8 else self.q_out
        yield KernelLaunch(
            kernel=rotate_queries,
            grid=(tokens,),
            arguments=(
                self.index_q,
                self.weights,
                self.positions,
                self.cos_sin,
                self.scale,
                q_out,
                self.weights_out,
                q_out if self.q_scale_out is None else self.q_scale_out,
            ),
            constants={
                "HEADS": heads,
                "WIDTH": width,
                "ROPE": self.cos_sin.shape[1],
                "FORMAT": self.index_cache_dtype,
                "BLOCK_H": triton.next_power_of_2(heads),
            },
            warps=8,
        )
