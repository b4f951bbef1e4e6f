"""A size that Dynamo was told to be another one is measured in every call, and is part of what was captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dsv4_compile


def model(x: Tensor, y: Tensor) -> Tensor:
    return torch.ops.toy.fresh(torch.relu(x) + y) * 2


def marked(size: int) -> tuple[Tensor, Tensor]:
    tensors = torch.randn(size, 4), torch.randn(size, 4)
    for tensor in tensors:
        torch._dynamo.decorators.mark_unbacked(tensor, 0, hint_override=size, shape_id="n")
    return tensors


@torch.no_grad()
@pytest.mark.parametrize("piece_compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_sizes_of_one_name_are_served(piece_compiler: str) -> None:
    options = {"split_ops": ["toy::fresh"], "piece_compiler": piece_compiler}
    function = torch.compile(model, backend="dsv4_piecewise", fullgraph=True, options=options)
    for size in (6, 6, 6, 3, 3, 1, 1, 6):
        x, y = marked(size)
        torch.testing.assert_close(function(x, y), model(x, y))
    assert dsv4_compile.counters.graphs_compiled == 1
    assert dsv4_compile.counters.captures >= 2


@torch.no_grad()
def test_a_call_in_which_they_differ_is_never_replayed() -> None:
    """Dynamo's guards are off, as in serving engines, so nobody else would notice."""
    function = torch.compile(
        model,
        backend="dsv4_piecewise",
        fullgraph=True,
        options={"split_ops": ["toy::fresh"], "guard_filter_fn": lambda guards: [False] * len(guards)},
    )
    for _ in range(3):
        function(*marked(6))
    with pytest.raises(RuntimeError, match=r"Eq\(u1, u0\)"):
        function(torch.randn(6, 4), torch.randn(1, 4))
    x, y = marked(6)
    torch.testing.assert_close(function(x, y), model(x, y))


def test_the_plan_names_it() -> None:
    plan = dsv4_compile.explain(model, *marked(6), options={"split_ops": ["toy::fresh"]})
    assert "y.size()[0]" in str(plan)
