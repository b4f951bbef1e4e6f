"""`dsv4::indexer_q_rope`: RoPE of the indexer's queries, scaling of its head weights.

The queries take the format of the keys that they will be multiplied with, see `cache_formats.py`. An fp8 query has one
scale for a head, which goes into its head weight: relu(s * x) = s * relu(x).
"""

from __future__ import annotations

from torch import Tensor

from ._library import define_op
from ._math import rotate
from ._quantise import quantise_e4m3, scale_values
from .cache_formats import FP8, INDEX_FORMATS, MXFP4, check_format, check_queries, pack

SCHEMA = (
    "indexer_q_rope(Tensor index_q, Tensor weights, Tensor positions, Tensor cos_sin, float scale, "
    'Tensor(a!) q_out, Tensor(b!) weights_out, Tensor(c!)? q_scale_out=None, str index_cache_dtype="auto") -> ()'
)


def indexer_q_rope(
    index_q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    scale: float,
    q_out: Tensor,
    weights_out: Tensor,
    q_scale_out: Tensor | None = None,
    index_cache_dtype: str = "auto",
) -> None:
    """Rotate indexer queries and scale their weights.

    Args:
        index_q: [T, heads, width].
        weights: [T, heads].
        positions: [T] int64, inside the table for padded rows as well.
        cos_sin: fp32 [max_pos, rd].
        scale: (width * heads) ** -0.5.
        q_out: [T, heads, width], every row written; float8_e4m3fn for "fp8"; uint8 [T, heads, width / 2] for "mxfp4".
        weights_out: [T, heads], every row written.
        q_scale_out: uint8 [T, heads, scale bytes] for "mxfp4", every row written; else None.
        index_cache_dtype: "auto": queries in the dtype of `q_out`; or "fp8" or "mxfp4".

    Raises:
        ArgumentError: a format that there is not, or outputs of another one.
    """
    check_format("indexer_q_rope", "index_cache_dtype", index_cache_dtype, INDEX_FORMATS)
    check_queries("indexer_q_rope", "q_out", q_out, q_scale_out, index_cache_dtype)
    rotated = rotate(index_q, cos_sin[positions].unsqueeze(1))
    scaled = weights.float() * scale
    if index_cache_dtype == FP8:
        rotated, scales = quantise_e4m3(rotated, rotated.shape[-1])
        scaled = scaled * scale_values(scales).squeeze(-1)
    if index_cache_dtype == MXFP4 and q_scale_out is not None:
        rotated, scales = pack(rotated, MXFP4)
        q_scale_out.copy_(scales)
    q_out.copy_(rotated)
    weights_out.copy_(scaled)


define_op(SCHEMA, indexer_q_rope, role="capture")
