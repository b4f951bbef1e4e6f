"""Triton kernel of `dsv4::indexer_q_rope`: one program for all heads of a token, and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ._device import rotate
from .checks import FLOATS, first_reason, no_architecture, not_a, not_contiguous, not_plain, not_power_of_two
from .launch import KernelLaunch
from .table import PLAIN


@triton.jit(do_not_specialize_on_alignment=["weights", "positions", "weights_out"])
def rotate_queries(
    index_q,
    weights,
    positions,
    cos_sin,
    scale,
    q_out,
    weights_out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    cells = (token * HEADS + heads[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :]
    rows = tl.load(index_q + cells, mask=is_head[:, None], other=0.0).to(tl.float32)
    rows = rotate(rows, cos_sin + tl.load(positions + token) * ROPE, False, BLOCK_H, WIDTH, ROPE)
    tl.store(q_out + cells, rows.to(q_out.dtype.element_ty), mask=is_head[:, None])
    weight = tl.load(weights + token * HEADS + heads, mask=is_head, other=0.0).to(tl.float32) * scale
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
        numbers = {
            "index_q": self.index_q,
            "weights": self.weights,
            "q_out": self.q_out,
            "weights_out": self.weights_out,
        }
        return first_reason(
            no_architecture(self.index_q.device),
            not_plain(index_cache_dtype=self.index_cache_dtype),
            not_a(FLOATS, **numbers),
            not_power_of_two(index_head_dim=self.index_q.shape[2]),
            not_contiguous(**numbers, positions=self.positions, cos_sin=self.cos_sin),
        )

    def launches(self, architecture: str | None = None) -> Iterator[KernelLaunch]:
        """What is launched, the same for every architecture."""
        tokens, heads, width = self.index_q.shape
        yield KernelLaunch(
            kernel=rotate_queries,
            grid=(tokens,),
            arguments=(
                self.index_q,
                self.weights,
                self.positions,
                self.cos_sin,
                self.scale,
                self.q_out,
                self.weights_out,
            ),
            constants={
                "HEADS": heads,
                "WIDTH": width,
                "ROPE": self.cos_sin.shape[1],
                "BLOCK_H": triton.next_power_of_2(heads),
            },
            warps=8,
        )
