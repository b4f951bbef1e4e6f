"""What is made of the inputs of a graph: refusals, and what an input is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import dsv4_compile
from dsv4_compile.errors import UnsupportedInputError


class Sealed(TwoTensor):  # type: ignore[misc]
    """A wrapper subclass that gives no value away."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("subclass", [TwoTensor, Sealed])
def test_a_wrapper_subclass_is_refused_unread(subclass: Any) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dsv4_piecewise")
    message = f"^x is a {subclass.__name__}: a captured piece needs plain tensors"
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=message):
        compiled(subclass(torch.ones(1), torch.ones(1)))


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
