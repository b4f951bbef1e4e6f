"""`dsv4::indexer_q_rope`: RoPE of the indexer's queries, scaling of its head weights."""

from __future__ import annotations

from torch import Tensor

from ._library import define_op
from ._math import rotate

SCHEMA = (
    "indexer_q_rope(Tensor index_q, Tensor weights, Tensor positions, Tensor cos_sin, float scale, "
    "Tensor(a!) q_out, Tensor(b!) weights_out) -> ()"
)


def indexer_q_rope(
    index_q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    scale: float,
    q_out: Tensor,
    weights_out: Tensor,
) -> None:
    """Rotate indexer queries and scale their weights.

    Args:
        index_q: [T, heads, width].
        weights: [T, heads].
        positions: [T] int64, inside the table for padded rows as well.
        cos_sin: fp32 [max_pos, rd].
        scale: (width * heads) ** -0.5.
        q_out: [T, heads, width], every row written.
        weights_out: [T, heads], every row written.
    """
    q_out.copy_(rotate(index_q, cos_sin[positions].unsqueeze(1)))
    weights_out.copy_(weights.float() * scale)


define_op(SCHEMA, indexer_q_rope, role="capture")
