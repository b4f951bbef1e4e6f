"""`dsv4::inverse_rope`: rotate attention outputs back, since keys are values and carry their rotation."""

from __future__ import annotations

from torch import Tensor

from ._library import define_op
from ._math import rotate

SCHEMA = "inverse_rope(Tensor x, Tensor positions, Tensor cos_sin, Tensor(a!) out) -> ()"


def inverse_rope(x: Tensor, positions: Tensor, cos_sin: Tensor, out: Tensor) -> None:
    """Inverse RoPE on the last rd dims.

    Args:
        x: [T, H, D].
        positions: [T] int64, inside the table for padded rows as well.
        cos_sin: fp32 [max_pos, rd].
        out: [T, H, D], every row written.
    """
    out.copy_(rotate(x, cos_sin[positions].unsqueeze(1), inverse=True))


define_op(SCHEMA, inverse_rope, role="capture")
