"""`dsv4::qnorm_rope_kv_insert`: per-head norm and RoPE of q, RoPE of kv, insert of kv into the sliding-window cache."""

from __future__ import annotations

from torch import Tensor

from ._library import define_op
from ._math import rms_normalise, rotate
from .cache_formats import KV_FORMATS, check_cache, check_format, insert_entries

SCHEMA = (
    "qnorm_rope_kv_insert(Tensor q, Tensor kv, Tensor positions, Tensor cos_sin, Tensor slot_mapping, float eps, "
    'Tensor(a!) q_out, Tensor(b!) swa_cache, str kv_cache_dtype="auto") -> ()'
)


def qnorm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slot_mapping: Tensor,
    eps: float,
    q_out: Tensor,
    swa_cache: Tensor,
    kv_cache_dtype: str = "auto",
) -> None:
    """Prepare q and store kv; q has no norm weight, kv comes normed.

    Args:
        q: [T, H, D].
        kv: [T, D], before RoPE.
        positions: [T] int64, inside the table for padded rows as well.
        cos_sin: fp32 [max_pos, rd].
        slot_mapping: [T] int64, slots of the cache; -1 stores nothing.
        eps: added to the mean square.
        q_out: [T, H, D], every row written.
        swa_cache: [num_blocks, block_size, D], or bytes of a packed format, written.
        kv_cache_dtype: "auto": rows in the dtype of the cache; or "fp8_ds_mla".

    Raises:
        ArgumentError: a format that there is not.
        CacheBindingError: the cache is not laid out so.
    """
    rope_dims = cos_sin.shape[-1]
    check_format("qnorm_rope_kv_insert", "kv_cache_dtype", kv_cache_dtype, KV_FORMATS)
    check_cache("qnorm_rope_kv_insert", "swa_cache", swa_cache, kv_cache_dtype, kv.shape[-1], rope_dims)
    turn = cos_sin[positions]
    q_out.copy_(rotate(rms_normalise(q, eps), turn.unsqueeze(1)))
    insert_entries(swa_cache, slot_mapping, rotate(kv, turn), kv_cache_dtype, rope_dims)


define_op(SCHEMA, qnorm_rope_kv_insert, role="prepare", step_state=("slot_mapping",))
