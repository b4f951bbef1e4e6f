"""Triton kernel of `dsv4::inverse_rope`: one program for a token and some of its heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ._device import rotate
from .checks import FLOATS, first_reason, no_architecture, not_a, not_contiguous, not_power_of_two
from .launch import KernelLaunch

HEADS_OF_A_PROGRAM = 8


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rotate_back(
    x,
    positions,
    cos_sin,
    out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = (heads < HEADS)[:, None]
    cells = (token * HEADS + heads[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :]
    rows = tl.load(x + cells, mask=is_head, other=0.0).to(tl.float32)
    rows = rotate(rows, cos_sin + tl.load(positions + token) * ROPE, True, BLOCK_H, WIDTH, ROPE)
    tl.store(out + cells, rows.to(out.dtype.element_ty), mask=is_head)


@dataclass(frozen=True, slots=True)
class InverseRopeCall:
    """The arguments of `dsv4::inverse_rope`, as its schema has them."""

    x: Tensor
    positions: Tensor
    cos_sin: Tensor
    out: Tensor

    def why_not(self) -> str | None:
        """Why no kernel fits, None if one does."""
        return first_reason(
            no_architecture(self.x.device),
            not_a(FLOATS, x=self.x, out=self.out),
            not_power_of_two(head_dim=self.x.shape[2]),
            not_contiguous(x=self.x, positions=self.positions, cos_sin=self.cos_sin, out=self.out),
        )

    def launches(self, architecture: str | None = None) -> Iterator[KernelLaunch]:
        """What is launched, the same for every architecture."""
        tokens, heads, width = self.x.shape
        yield KernelLaunch(
            kernel=rotate_back,
            grid=(tokens, triton.cdiv(heads, HEADS_OF_A_PROGRAM)),
            arguments=(self.x, self.positions, self.cos_sin, self.out),
            constants={
                "HEADS": heads,
                "WIDTH": width,
                "ROPE": self.cos_sin.shape[1],
                "BLOCK_H": HEADS_OF_A_PROGRAM,
            },
        )
