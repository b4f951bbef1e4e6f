"""A function whose split op does what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from toy_ops import Host

toy = torch.ops.toy


HOOK = {"split_ops": ("toy::hook", "toy::fresh")}


def set_hook(function: Callable[[Tensor], Tensor]) -> None:
    Host.function = staticmethod(function)


def hooked(x: Tensor) -> Tensor:
    """Values live over the hook, in the workspace: a, b and their sum."""
    a, b = x.sin(), x.cos()
    h = a + b
    out = torch.empty_like(h)
    toy.hook(h, out)
    return toy.fresh(out * a) + b + x


def expected(x: Tensor) -> Tensor:
    out = 2 * (x.sin() + x.cos())
    return 2 * (out * x.sin()) + x.cos() + x
