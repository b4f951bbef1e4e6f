"""Triton kernel of `dsv4::qnorm_rope_kv_insert`: a token's programs take some of its heads each, and the last one kv.

The row of kv goes to its slot, and nowhere if that is -1; rows of padded tokens are computed as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..cache_formats import KV_FORMATS, PLAIN
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
    FORMAT: tl.constexpr,
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
            row = rotate(row, cos_sin_row, False, 1, WIDTH, ROPE)
            store_entry(swa_cache, slot, page, row, FORMAT, ROWS, WIDTH, ROPE)


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
            not_a(FLOATS, **rows),
            not_power_of_two(head_dim=self.q.shape[2]),
            not_packable(self.kv_cache_dtype, self.q.shape[2]),
            not_laid_out(
                self.kv_cache_dtype, KV_FORMATS, self.q.shape[2], self.cos_sin.shape[1], swa_cache=self.swa_cache
            ),
            None if self.kv_cache_dtype != PLAIN else not_a(FLOATS, swa_cache=self.swa_cache),
            not_rows(self.q.shape[0], **rows, positions=self.positions, slot_mapping=self.slot_mapping),
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
                "FORMAT": self.kv_cache_dtype,
                "BLOCK_H": HEADS_OF_A_PROGRAM,
            },
        )
