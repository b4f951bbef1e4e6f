"""What a captured op reads through the step context must stay where it was at capture, and there must be one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from toy_ops import StepContext

import dsv4_compile
from dsv4_compile.errors import ArgumentError, HazardError


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, kv: Tensor) -> Tensor:
        torch.ops.toy.context_write(kv * 2, self.cache)
        return torch.ops.toy.fresh(self.cache[:2]) + 1


@pytest.fixture(autouse=True)
def _no_step() -> Iterator[None]:
    yield
    StepContext.slots = None


def step() -> dict[str, Tensor]:
    return {} if StepContext.slots is None else {"the slots of layer 0": StepContext.slots}


def compiled(context=step, **options: object):
    dsv4_compile.register_op("toy::context_write", role="prepare", reads_context=True, context=context)
    options = {"split_ops": ["toy::fresh"], "runner": "mrv2", **options}
    return torch.compile(Model(), backend="dsv4_piecewise", dynamic=True, options=options)


@torch.no_grad()
def test_a_step_that_is_kept_in_place_is_replayed() -> None:
    function, plain = compiled(), Model()
    StepContext.slots = torch.zeros(3, dtype=torch.int64)
    for turn in range(4):
        StepContext.slots.copy_(torch.arange(3) + turn)
        kv = torch.randn(3, 4)
        torch.testing.assert_close(function(kv), plain(kv))
    assert dsv4_compile.counters.replays == 3


@torch.no_grad()
@pytest.mark.parametrize("check", ["addresses", "full"])
def test_a_step_that_moves_is_refused_by_name(check: str) -> None:
    function = compiled(check=check)
    StepContext.slots = kept = torch.arange(3)
    for _ in range(3):
        function(torch.randn(3, 4))
    StepContext.slots = kept.clone()
    with pytest.raises(HazardError, match="has moved since: the slots of layer 0: set runner"):
        function(torch.randn(3, 4))
    StepContext.slots = kept
    function(torch.randn(3, 4))


@torch.no_grad()
def test_a_capture_without_a_step_is_refused() -> None:
    function = compiled()
    function(torch.randn(3, 4))
    with pytest.raises(HazardError, match=r"context_write.default \(.*\) is captured, and there is no step context"):
        function(torch.randn(3, 4))


@torch.no_grad()
def test_who_trusts_the_runner_is_not_asked() -> None:
    def never() -> dict[str, Tensor]:
        raise AssertionError("the options say that nothing is checked")

    function = compiled(never, check="off")
    StepContext.slots = torch.arange(3)
    for _ in range(3):
        function(torch.randn(3, 4))
    assert dsv4_compile.counters.replays == 2


@torch.no_grad()
def test_an_eager_reader_may_find_its_step_anywhere() -> None:
    function, plain = compiled(runner="mrv1"), Model()
    for turn in range(4):
        StepContext.slots = torch.arange(3) + turn
        kv = torch.randn(3, 4)
        torch.testing.assert_close(function(kv), plain(kv))


@pytest.mark.parametrize(("context", "reads"), [(3, True), (step, False)])
def test_a_context_that_means_nothing_is_refused(context: object, reads: bool) -> None:
    with pytest.raises(ArgumentError, match=r"context is .*; it must be a function, with reads_context=True"):
        dsv4_compile.register_op("toy::context_write", role="prepare", reads_context=reads, context=context)
