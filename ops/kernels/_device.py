"""What the kernels of rows share on the device: RMS norm, and RoPE of interleaved pairs. Inlined where it is called."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalise(x, eps, WIDTH: tl.constexpr):
    """Rows of x, fp32 [rows, columns], over their root mean square; columns past WIDTH are zero."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]


@triton.jit
def rotate(x, cos_sin_row, INVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """RoPE on the last ROPE columns of x, fp32 [ROWS, WIDTH], all at one position.

    Args:
        x: what is rotated.
        cos_sin_row: pointer to ROPE / 2 cosines, then ROPE / 2 sines.
        INVERSE: rotate back.
        ROWS: a power of two, as WIDTH is.
        WIDTH: columns.
        ROPE: rotated columns.
    """
    pair = tl.arange(0, WIDTH // 2) - (WIDTH - ROPE) // 2
    turned = (pair >= 0)[None, :]
    cos = tl.load(cos_sin_row + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(cos_sin_row + ROPE // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    # not by a rotation of 0: that would turn a -0.0 into 0.0, and spread an infinity
    new_even = tl.where(turned, even * cos - odd * sin, even)
    new_odd = tl.where(turned, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(new_even, new_odd), (ROWS, WIDTH))
