"""`dsv4_compile.capture`: buckets ahead of serving, and no trace of the dummy calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_ops import SPLIT

import dsv4_compile


class Cached(nn.Module):
    """Writes a buffer and an input, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        self.cache[: x.shape[0]].add_(x)
        seen.add_(1)
        return torch.ops.toy.fresh(self.cache[: x.shape[0]] + torch.rand_like(x))


def compiled(engine: str) -> tuple[Cached, Any]:
    model = Cached()
    options: dict[str, Any] = {"split_ops": SPLIT, "engine": engine}
    return model, torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)


@pytest.mark.parametrize("engine", ["off", "host"])
def test_dummy_calls_leave_no_trace(engine: str) -> None:
    model, run = compiled(engine)
    seen, random_state = torch.zeros(3), torch.get_rng_state()
    dsv4_compile.capture(run, lambda n: (torch.ones(n, 4), seen), [4, 8])
    assert model.cache.sum() == 0
    assert seen.sum() == 0
    assert torch.equal(torch.get_rng_state(), random_state)


def test_largest_first_and_then_every_call_replays() -> None:
    _, run = compiled("host")
    order: list[int] = []

    def inputs_for(n: int) -> dict[str, Tensor]:
        order.append(n)
        return {"x": torch.ones(n, 4), "seen": seen}

    seen = torch.zeros(3)
    with dsv4_compile.counters.expect(captures=3, uncaptured_calls=3):
        dsv4_compile.capture(run, inputs_for, [4, 16, 8, 4])
    assert order == [16, 8, 4]
    with torch.no_grad(), dsv4_compile.counters.expect(replays=3, captures=0, uncaptured_calls=0):
        for n in (8, 4, 16):
            run(torch.ones(n, 4), seen)


def test_a_failing_dummy_call_is_undone_too() -> None:
    model, run = compiled("host")
    with pytest.raises(RuntimeError, match="size"):
        dsv4_compile.capture(run, lambda n: (torch.ones(n, 5), torch.zeros(3)), [4])
    assert model.cache.sum() == 0
