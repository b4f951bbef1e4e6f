"""RoPE tables: plain for sliding-window layers, another base with YaRN for every RoPE of the compressed layers.

Angles are computed in fp32 on purpose: the public implementations do so, and at long positions the rounding of the
angle is larger than the tolerance of a comparison with them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .config import DeepseekV4Config, LayerKind, YarnScaling


def build_cos_sin(config: DeepseekV4Config, kind: LayerKind, device: torch.device | str | None = None) -> Tensor:
    """The table a layer of the given kind reads: fp32 [max_position_embeddings, rd], rd/2 cosines then rd/2 sines."""
    compressed = kind is not LayerKind.SWA
    theta = config.compress_rope_theta if compressed else config.rope_theta
    frequencies = _frequencies(theta, config.qk_rope_head_dim, device)
    if compressed and config.rope_scaling is not None:
        frequencies = _scale_frequencies(frequencies, theta, config.qk_rope_head_dim, config.rope_scaling)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class RotaryTable(nn.Module):
    """Holds one table for all layers that use it; it stays fp32 when the model is cast."""

    cos_sin: Tensor

    def __init__(self, config: DeepseekV4Config, kind: LayerKind, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("cos_sin", build_cos_sin(config, kind, device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryTable:
        exact = self.cos_sin
        super()._apply(fn, recurse)
        if self.cos_sin.dtype is not exact.dtype:
            self.cos_sin = exact.to(self.cos_sin.device)
        return self


def _frequencies(theta: float, rope_dims: int, device: torch.device | str | None) -> Tensor:
    exponents = torch.arange(0, rope_dims, 2, dtype=torch.float32, device=device) / rope_dims
    return 1.0 / theta**exponents


def _scale_frequencies(frequencies: Tensor, theta: float, rope_dims: int, yarn: YarnScaling) -> Tensor:
    """Interpolate the slow dims by `factor`, keep the fast ones, ramp in between."""
    low = max(math.floor(_dim_of_rotations(yarn.beta_fast, theta, rope_dims, yarn)), 0)
    high = min(math.ceil(_dim_of_rotations(yarn.beta_slow, theta, rope_dims, yarn)), rope_dims - 1)
    width = high - low if high != low else 0.001
    index = torch.arange(rope_dims // 2, dtype=torch.float32, device=frequencies.device)
    ramp = ((index - low) / width).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn.factor * ramp


def _dim_of_rotations(rotations: float, theta: float, rope_dims: int, yarn: YarnScaling) -> float:
    """The (fractional) dim that turns the given number of times over the original context length."""
    turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
    return rope_dims * math.log(turns) / (2 * math.log(theta))
