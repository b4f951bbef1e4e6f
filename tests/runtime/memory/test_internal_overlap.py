"""Inputs whose elements share memory, written by the graph: copied and put back as they lie."""

from __future__ import annotations

import pytest
import torch
from runtime_helpers import compile_host
from torch import Tensor

import dsv4_compile


def bump(x: Tensor, cache: Tensor) -> Tensor:
    cache[0].add_(1)
    return torch.ops.toy.fresh(x) + cache.sum()


def expanded(memory: Tensor) -> Tensor:
    return memory.expand(3, 5)


def windows(memory: Tensor) -> Tensor:
    return memory.view(-1).as_strided((2, 3), (1, 1))


@pytest.mark.parametrize("layout", [expanded, windows])
@pytest.mark.parametrize("keeps_moving", [True, False])
def test_an_overlapping_input_that_is_written(layout, keeps_moving: bool) -> None:
    compiled = compile_host(bump)
    pairs = [(torch.zeros(1, 5), torch.zeros(1, 5)) for _ in range(8)]
    with torch.no_grad():
        for call in range(8):
            mine, theirs = pairs[call if keeps_moving else 0]
            x = torch.randn(4, 5) if layout is expanded else torch.randn(4, 3)
            assert torch.equal(compiled(x, layout(mine)), bump(x, layout(theirs)))
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layout", [expanded, windows])
def test_capture_puts_an_overlapping_input_back(layout) -> None:
    compiled, memory = compile_host(bump), torch.arange(5.0).view(1, 5)
    width = layout(memory).shape[1]
    dsv4_compile.capture(compiled, lambda n: (torch.randn(n, width), layout(memory)), [4, 8])
    assert torch.equal(memory, torch.arange(5.0).view(1, 5))
