"""Triton kernel of `dsv4::qnorm_rope_kv_insert`: a token's programs take some of its heads each, and the last one kv.

The row of kv goes to its slot, and nowhere if that is -1; rows of padded tokens are computed as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ._device import normalise, rotate
from .checks import FLOATS, first_reason, no_architecture, not_a, not_contiguous, not_pages, not_plain, not_power_of_two
from .launch import KernelLaunch
from .table import PLAIN

HEADS_OF_A_PROGRAM = 4


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def prepare_query_and_kv(
    q,
    kv,
    positions,
    cos_sin,
    slot_mapping,
    eps,
    q_out,
    swa_cache,
    page,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cos_sin_row = cos_sin + tl.load(positions + token) * ROPE
    width = tl.arange(0, WIDTH)
    if tl.program_id(1) < tl.num_programs(1) - 1:
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        is_head = (heads < HEADS)[:, None]
        cells = (token * HEADS + heads[:, None]) * WIDTH + width[None, :]
        rows = tl.load(q + cells, mask=is_head, other=0.0).to(tl.float32)
        rows = rotate(normalise(rows, eps, WIDTH), cos_sin_row, False, BLOCK_H, WIDTH, ROPE)
        tl.store(q_out + cells, rows.to(q_out.dtype.element_ty), mask=is_head)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            row = tl.load(kv + token * WIDTH + width).to(tl.float32)[None, :]
            row = tl.reshape(rotate(row, cos_sin_row, False, 1, WIDTH, ROPE), (WIDTH,))
            start = swa_cache + (slot // ROWS * page + slot % ROWS * WIDTH)
            tl.store(start + width, row.to(swa_cache.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class QnormRopeKvInsertCall:
    """The arguments of `dsv4::qnorm_rope_kv_insert`, as its schema has them."""

    q: Tensor
    kv: Tensor
    positions: Tensor
    cos_sin: Tensor
    slot_mapping: Tensor
    eps: float
    q_out: Tensor
    swa_cache: Tensor
    kv_cache_dtype: str = PLAIN

    def why_not(self) -> str | None:
        """Why no kernel fits, None if one does."""
        rows = {"q": self.q, "kv": self.kv, "q_out": self.q_out}
        return first_reason(
            no_architecture(self.q.device),
            not_plain(kv_cache_dtype=self.kv_cache_dtype),
            not_a(FLOATS, **rows, swa_cache=self.swa_cache),
            not_power_of_two(head_dim=self.q.shape[2]),
            not_pages(swa_cache=self.swa_cache),
            not_contiguous(**rows, positions=self.positions, cos_sin=self.cos_sin, slot_mapping=self.slot_mapping),
        )

    def launches(self, architecture: str | None = None) -> Iterator[KernelLaunch]:
        """What is launched, the same for every architecture."""
        tokens, heads, width = self.q.shape
        yield KernelLaunch(
            kernel=prepare_query_and_kv,
            grid=(tokens, triton.cdiv(heads, HEADS_OF_A_PROGRAM) + 1),
            arguments=(
                self.q,
                self.kv,
                self.positions,
                self.cos_sin,
                self.slot_mapping,
                self.eps,
                self.q_out,
                self.swa_cache,
                self.swa_cache.stride(0),
            ),
            constants={
                "HEADS": heads,
                "WIDTH": width,
                "ROPE": self.cos_sin.shape[1],
                "ROWS": self.swa_cache.shape[1],
                "BLOCK_H": HEADS_OF_A_PROGRAM,
            },
        )
