"""The arithmetic the ops share, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """x over the root mean square of its last dim, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def rotate(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """RoPE of interleaved pairs on the last rd dims, in fp32.

    Args:
        x: [..., D].
        cos_sin: fp32, broadcastable to [..., rd]: rd/2 cosines, then rd/2 sines.
        inverse: rotate back.
    """
    x = x.float()
    rope_dims = cos_sin.shape[-1]
    cos, sin = cos_sin.chunk(2, dim=-1)
    if inverse:
        sin = -sin
    kept, turned = x[..., :-rope_dims], x[..., -rope_dims:]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([kept, turned], dim=-1)
