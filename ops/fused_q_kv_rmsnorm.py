"""`dsv4::fused_q_kv_rmsnorm`: both RMS norms after the fused down projection, fp32 inside and one cast at the end."""

from __future__ import annotations

from torch import Tensor

from ._library import define_op
from ._math import rms_normalise

SCHEMA = (
    "fused_q_kv_rmsnorm(Tensor qr_kv, Tensor q_weight, Tensor kv_weight, float eps, "
    "Tensor(a!) qr_out, Tensor(b!) kv_out) -> ()"
)


def fused_q_kv_rmsnorm(
    qr_kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, qr_out: Tensor, kv_out: Tensor
) -> None:
    """Normalise the two halves of a fused projection.

    Args:
        qr_kv: [T, q_lora + D].
        q_weight: [q_lora].
        kv_weight: [D].
        eps: added to the mean square.
        qr_out: [T, q_lora], written.
        kv_out: [T, D], written.
    """
    qr, kv = qr_kv.split([q_weight.shape[0], kv_weight.shape[0]], dim=-1)
    qr_out.copy_(rms_normalise(qr, eps) * q_weight.float())
    kv_out.copy_(rms_normalise(kv, eps) * kv_weight.float())


define_op(SCHEMA, fused_q_kv_rmsnorm, role="capture")
