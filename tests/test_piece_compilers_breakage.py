"""What piece compilers are known to get wrong, or could: each program computes what it does in eager, on every path."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from case_helpers import assert_same, rows
from torch import Tensor, nn
from toy_ops import SPLIT

toy = torch.ops.toy
COMPILERS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.inductor))
every_compiler = pytest.mark.parametrize("compiler", COMPILERS)


def compiled_with(compiler: Any, function: Any, **options: Any) -> Any:
    options = {"split_ops": SPLIT, "piece_compiler": compiler, **options}
    return torch.compile(function, backend="dsv4_piecewise", dynamic=True, options=options)


def compare(function: Any, compiled: Any, *args: Any, strides: bool = True) -> None:
    """Call both on equal arguments; results, arguments, strides and random states must be those of eager."""
    given = copy.deepcopy(args)
    before = torch.get_rng_state()
    expected = function(*args)
    drawn = torch.get_rng_state()
    torch.set_rng_state(before)
    actual = compiled(*given)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_same((actual, given), (expected, args), tolerant=True)
    if strides:
        assert layouts(actual) == layouts(expected)


def layouts(results: Any) -> list[list[int]]:
    """Strides of what has several elements; that of a dimension of size one means nothing."""
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.numel()]
    return [[step for size, step in zip(leaf.shape, leaf.stride(), strict=True) if size > 1] for leaf in leaves]


DRAWS = {
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "multinomial": lambda x: torch.multinomial(x.abs(), 2),
    "normal": lambda x: torch.normal(x, x.abs()),
    "overwritten": lambda x: torch.empty_like(x).bernoulli_(0.5).zero_(),
    "poisson": lambda x: torch.poisson(x.abs()),
    "rand_like": torch.rand_like,
}


@every_compiler
@pytest.mark.parametrize("engine", ["off", "host"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_that_nothing_takes_is_drawn(compiler: str, engine: str, draw: str) -> None:
    """Compilers leave it out, and then all numbers behind it are others."""

    def model(x: Tensor) -> Tensor:
        DRAWS[draw](x)
        return toy.fresh(x + torch.rand_like(x))

    compiled = compiled_with(compiler, model, engine=engine)
    for _ in range(3):
        compare(model, compiled, rows(5))


@every_compiler
def test_a_piece_that_nothing_takes_is_no_empty_capture(compiler: str) -> None:
    def model(x: Tensor) -> Tensor:
        x * 2
        return toy.fresh(x)

    compiled = compiled_with(compiler, model)
    for _ in range(3):
        compare(model, compiled, rows(5))
