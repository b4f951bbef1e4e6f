"""A toy with arithmetic one can do by hand: per layer a projection, a split op, a projection back and a residual.

It needs torch alone, so that it also runs in an environment of another engine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.library import Library

WIDTH = 4
SPLIT_OP = "dispatch_benchmark::attend"
_library = Library("dispatch_benchmark", "DEF")
_library.define("attend(Tensor q, Tensor(a!) out) -> ()")


def _attend(q: Tensor, out: Tensor) -> None:
    torch.neg(q, out=out)


_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake(SPLIT_OP, lambda q, out: None, lib=_library)


class Toy(nn.Module):
    """Four kernels a layer: mm, attend, mm, add."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.down = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(layers))
        self.up = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] to the same."""
        for down, up in zip(self.down, self.up, strict=True):
            q = torch.mm(x, down)
            out = torch.empty_like(q)
            torch.ops.dispatch_benchmark.attend(q, out)
            x = x + torch.mm(out, up)
        return x
