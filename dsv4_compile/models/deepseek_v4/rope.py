"""RoPE tables: one for sliding-window layers, one for every RoPE of the compressed layers, each with its own base and
scaling.

The attention factor of YaRN is part of the table: it multiplies cosines and sines, so it holds for queries, keys and
the rotation back alike, as in transformers. Angles are computed in fp32 on purpose: the public implementations do so,
and at long positions the rounding of the angle is larger than the tolerance of a comparison with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .config import DeepseekV4Config, LayerKind
from .rope_parameters import RopeScaling, YarnScaling


def build_cos_sin(config: DeepseekV4Config, kind: LayerKind, device: torch.device | str | None = None) -> Tensor:
    """The table a layer of the given kind reads: fp32 [max_position_embeddings, rd], rd/2 cosines then rd/2 sines."""
    theta, scaling = config.rope(kind)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
    angles = torch.outer(positions, _frequencies(theta, config.qk_rope_head_dim, scaling, device))
    attention_factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor


class RotaryTable(nn.Module):
    """Holds one table for all layers that use it; it stays fp32 when the model is cast."""

    cos_sin: Tensor

    def __init__(self, config: DeepseekV4Config, kind: LayerKind, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("cos_sin", build_cos_sin(config, kind, device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        exact = self.cos_sin
        super()._apply(fn, recurse)
        if self.cos_sin.dtype is not exact.dtype:
            self.cos_sin = exact.to(self.cos_sin.device)
        return self


def _frequencies(
    theta: float, rope_dims: int, scaling: RopeScaling | None, device: torch.device | str | None
) -> Tensor:
    periods = theta ** (torch.arange(0, rope_dims, 2, dtype=torch.float32, device=device) / rope_dims)
    if isinstance(scaling, YarnScaling):
        return _blend(periods, theta, rope_dims, scaling)
    return 1.0 / periods if scaling is None else 1.0 / periods / scaling.factor


def _blend(periods: Tensor, theta: float, rope_dims: int, yarn: YarnScaling) -> Tensor:
    """Interpolate the slow dims by `factor`, keep the fast ones, ramp in between."""
    low = max(math.floor(_dim_of_rotations(yarn.beta_fast, theta, rope_dims, yarn)), 0)
    high = min(math.ceil(_dim_of_rotations(yarn.beta_slow, theta, rope_dims, yarn)), rope_dims - 1)
    width = high - low if high != low else 0.001
    index = torch.arange(rope_dims // 2, dtype=torch.float32, device=periods.device)
    kept = 1 - ((index - low) / width).clamp(0, 1)
    # rounded as in transformers: at long positions the last bit of a frequency shows
    return 1.0 / (yarn.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _dim_of_rotations(rotations: float, theta: float, rope_dims: int, yarn: YarnScaling) -> float:
    """The (fractional) dim that turns the given number of times over the original context length."""
    turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
    return rope_dims * math.log(turns) / (2 * math.log(theta))
