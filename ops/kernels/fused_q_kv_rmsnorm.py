"""Triton kernel of `dsv4::fused_q_kv_rmsnorm`: one program for each of the two halves of a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ._device import normalise
from .checks import FLOATS, first_reason, no_architecture, not_a, not_contiguous
from .launch import KernelLaunch


@triton.jit
def normalise_half(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    row = tl.load(x + column, mask=there, other=0.0).to(tl.float32)
    normed = tl.reshape(normalise(row[None, :], eps, WIDTH), (BLOCK,))
    normed = normed * tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + column, normed.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize_on_alignment=["q_weight", "kv_weight"])
def normalise_both(
    qr_kv,
    q_weight,
    kv_weight,
    eps,
    qr_out,
    kv_out,
    Q_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = qr_kv + token * (Q_WIDTH + KV_WIDTH)
    if tl.program_id(1) == 0:
        normalise_half(row, q_weight, qr_out + token * Q_WIDTH, eps, Q_WIDTH, Q_BLOCK)
    else:
        normalise_half(row + Q_WIDTH, kv_weight, kv_out + token * KV_WIDTH, eps, KV_WIDTH, KV_BLOCK)


@dataclass(frozen=True, slots=True)
class FusedQKvRmsnormCall:
    """The arguments of `dsv4::fused_q_kv_rmsnorm`, as its schema has them."""

    qr_kv: Tensor
    q_weight: Tensor
    kv_weight: Tensor
    eps: float
    qr_out: Tensor
    kv_out: Tensor

    def why_not(self) -> str | None:
        """Why no kernel fits, None if one does."""
        inputs = {"qr_kv": self.qr_kv, "q_weight": self.q_weight, "kv_weight": self.kv_weight}
        outputs = {"qr_out": self.qr_out, "kv_out": self.kv_out}
        return first_reason(
            no_architecture(self.qr_kv.device),
            not_a(FLOATS, **inputs, **outputs),
            not_contiguous(**inputs, **outputs),
        )

    def launches(self, architecture: str | None = None) -> Iterator[KernelLaunch]:
        """What is launched, the same for every architecture."""
        q_width, kv_width = self.q_weight.shape[0], self.kv_weight.shape[0]
        yield KernelLaunch(
            kernel=normalise_both,
            grid=(self.qr_kv.shape[0], 2),
            arguments=(self.qr_kv, self.q_weight, self.kv_weight, self.eps, self.qr_out, self.kv_out),
            constants={
                "Q_WIDTH": q_width,
                "KV_WIDTH": kv_width,
                "Q_BLOCK": triton.next_power_of_2(q_width),
                "KV_BLOCK": triton.next_power_of_2(kv_width),
            },
        )
