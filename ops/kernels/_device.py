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
    cos = tl.load(cos_sin_row + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = tl.load(cos_sin_row + ROPE // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (ROWS, WIDTH))
