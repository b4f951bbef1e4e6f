"""What is made of the inputs of a graph."""

from __future__ import annotations

import torch
from torch import Tensor

import dsv4_compile


def test_every_int_of_the_user_is_a_host_scalar_of_the_plan() -> None:
    """Wherever it is kept; sizes, strides and offsets of tensors are none."""

    def function(x: Tensor, n: int, more: list[int], named: dict[str, int]) -> Tensor:
        return torch.ops.toy.fresh(x * n + more[0] + named["k"]) + x.stride(0)

    x = torch.ones(6, 8)[::2, 1:]
    plan = dsv4_compile.explain(function, x, 5, [7], {"k": 9}, options={"split_ops": ["toy::fresh"]})
    assert plan.scalars == ("n", "more[0]", "named.k")
    assert "host scalars, part of the bucket: n, more[0], named.k" in str(plan)


def test_a_unit_shows_the_ints_of_the_user_that_it_takes() -> None:
    """Sizes of tensors are in the record alone."""

    def function(x: Tensor, n: int) -> Tensor:
        return torch.ops.toy.fresh(x * n) + x.shape[0]

    plan = dsv4_compile.explain(function, torch.ones(6, 8), 5, options={"split_ops": ["toy::fresh"]})
    first = plan.units[0]
    assert [(value.name, value.layout, value.origin) for value in first.inputs] == [
        ("x.size()[0]", "number", "size"),
        ("x.size()[1]", "number", "size"),
        ("n", "number", "host scalar"),
        ("x", "[s77, s27] float32", "user input"),
    ]
    assert "inputs    host scalar: n\n              user input: x\n" in str(plan)
