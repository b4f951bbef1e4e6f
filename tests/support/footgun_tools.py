"""A function compiled and in eager, called alike and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import odd_ops  # noqa: F401
import torch
from program_oracle import clone_all, snapshot
from torch import Tensor
from toy_ops import LOG

PLANS = (("mrv2", "narrow", "host"), ("mrv1", "minimal", "host"), ("mrv2", "minimal", "off"), ("mrv1", "wide", "off"))


Arguments = Callable[[], tuple[Any, ...]]


def pair(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randn(n, 4)


def agrees(fn: Callable[..., Any], *calls: Arguments, options: dict[str, Any]) -> None:
    """Compile, make each call three times and then all once more; compare with eager."""
    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=options)
    held = []  # so that no address comes twice
    for number, make in enumerate([*(call for call in calls for _ in range(3)), *calls]):
        given = make()
        copies = clone_all(given)
        held.append((given, copies))
        LOG.clear()
        expected = [*snapshot(given, fn(*given)), list(LOG)]
        LOG.clear()
        assert [*snapshot(copies, compiled(*copies)), list(LOG)] == expected, f"call {number} differs from eager"
