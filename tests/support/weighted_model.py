"""A small model with a weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

toy = torch.ops.toy


class Model(nn.Module):
    """A linear layer that also adds up what it saw."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(scale * torch.randn(4, 4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        self.seen.add_(h.sum(0))
        return toy.fresh(h) + self.seen
