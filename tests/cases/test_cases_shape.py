"""Cases about shapes: which symbol counts tokens, sizes that are expressions, no tokens, one token, and buckets."""

from __future__ import annotations

import pytest
import torch
from case_helpers import (
    Pair,
    Setup,
    captured,
    check,
    each_captured_once,
    everywhere,
    everywhere_and_compiled,
    kinds,
    rows,
)
from torch import Tensor

import dsv4_compile
from dsv4_compile.errors import OptionError

toy = torch.ops.toy


def x_only(n: int) -> tuple[Tensor]:
    return (rows(n),)


def project(x: Tensor, w: Tensor) -> Tensor:
    return toy.fresh(x @ w).relu() @ w


@everywhere
def test_b03_hidden_size_is_part_of_the_bucket_and_no_token_count(setup: Setup) -> None:
    shapes = [(8, 4), (16, 4)] * 3 + [(8, 6), (16, 6)] * 3 + [(8, 4)] * 3
    pair = Pair(project, setup)
    with dsv4_compile.counters.expect(graphs_compiled=1), each_captured_once(setup, shapes):
        for n, h in shapes:
            pair(rows(n, h), rows(h, h))
    plan = setup.explain(project, rows(8), rows(4))
    assert dict(plan.sizes)[plan.tokens] == "x.size()[0]"


@everywhere
def test_b03_tokens_are_found_behind_a_weight_and_a_number(setup: Setup) -> None:
    def f(k: int, w, x):
        return project(x, w) * k

    check(setup, f, lambda n: (3, rows(4), rows(n)))
    plan = setup.explain(f, 3, rows(4), rows(8))
    assert dict(plan.sizes)[plan.tokens] == "x.size()[0]"
    assert plan.scalars == ("k",)


@everywhere
def test_b03_a_number_is_told_from_the_token_count(setup: Setup) -> None:
    def f(k: int, x):
        return toy.fresh(x + k) * k

    calls = [(8, 8), (16, 8), (8, 16)] * 3  # k first, of which one equals the number of tokens
    pair = Pair(f, setup)
    with each_captured_once(setup, calls):
        for k, n in calls:
            pair(k, rows(n))


@everywhere
def test_b03_two_sizes_that_are_equal_at_first(setup: Setup) -> None:
    pair = Pair(project, setup)
    for n, h in [(8, 8), (8, 8), (8, 8), (16, 8), (16, 8), (16, 8), (8, 4), (8, 4), (8, 4)]:
        pair(rows(n, h), rows(h, h))


class Gated(torch.nn.Module):
    """A piece of weights alone, with no size that changes, and one that knows tokens from a tensor only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.register_buffer("gate", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = toy.fresh(x)
        self.gate.copy_(self.weight @ self.weight)
        toy.tick(self.gate)
        return y.cos() @ self.gate


@everywhere
def test_b03_piece_without_a_size(setup: Setup) -> None:
    model = Gated()
    check(setup, model, x_only)
    static, dynamic = setup.explain(model, rows(8)).pieces
    assert [value.layout for value in static.inputs if value.name != "weight"] == ["[4, 4] float32"]
    assert any(value.layout == "[s77, 4] float32" for value in dynamic.inputs)


@everywhere_and_compiled
def test_b31_sizes_that_are_multiples_and_fractions(setup: Setup) -> None:
    def f(x):
        n = x.shape[0]
        wide, part = torch.zeros(n * 4, 4), x[: n // 4]
        y = toy.fresh(part.exp())
        wide[: y.shape[0]] += y
        z = toy.fresh(wide.cos())
        return z * n, part - 1

    check(setup, f, x_only, sizes=(8, 12, 16) * 3)


@everywhere
def test_b31_only_an_expression_reaches_the_last_piece(setup: Setup) -> None:
    def f(x):
        y = toy.fresh(torch.cat([x, x]).sin())
        z = toy.fresh(y.view(-1, 8)[:, 1:])
        return torch.arange(z.shape[0]).unsqueeze(1) * z

    check(setup, f, x_only, sizes=(8, 12, 16) * 3)


@pytest.mark.sampled(2)
@everywhere
def test_b31_many_tiny_pieces(setup: Setup) -> None:
    def f(x):
        n = x.shape[0]
        total = torch.zeros(n // 2, 4)
        for i in range(8):
            total = toy.fresh(total + x[i // 4 : n // 2 + i // 4]) / (n // 4 + i)
        return total.repeat(2, 1)

    check(setup, f, x_only, sizes=(8, 12, 16) * 3)
    assert kinds(setup.explain(f, rows(8))) == "pr" * 8 + "p"


def two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = toy.tup(x.exp())
    return a - b, a.sum(0)


@pytest.mark.sampled(2)
@everywhere
@pytest.mark.parametrize("sizes", [(8, 1, 1, 0, 0, 2), (1, 8, 0, 1, 1, 2), (0, 1, 8)], ids=str)
def test_b33_one_token_and_none(setup: Setup, sizes: tuple[int, ...]) -> None:
    pair = Pair(two_results, setup, capture_sizes=[1, 8])
    with dsv4_compile.counters.expect(captures=2 if setup.captures else 0, recaptures=0):
        for n in sizes * 3:
            first, second = pair(rows(n))
            assert (first.shape, second.shape) == ((n, 4), (4,))


@everywhere
def test_b33_the_constant_counts_where_there_is_one_token(setup: Setup) -> None:
    assert setup.explain(two_results, rows(1)).tokens == "1"
    assert setup.explain(two_results, rows(0)).tokens == "0"


@captured
def test_b33_no_tokens_are_never_captured(setup: Setup) -> None:
    with dsv4_compile.counters.expect(captures=0, uncaptured_calls=4):
        check(setup, two_results, x_only, sizes=(0, 0, 0, 0), steady=False)


@everywhere
def test_b34_only_the_listed_sizes_are_captured(setup: Setup) -> None:
    sizes = (8, 33, 32, 16, 15) * 3  # the smallest first
    listed = [32, 8, 8, 16]
    counts = {"captures": 3, "uncaptured_calls": 3 + 6} if setup.captures else {"captures": 0, "uncaptured_calls": 15}
    with dsv4_compile.counters.expect(recaptures=0, **counts):
        check(setup, two_results, x_only, sizes=sizes, steady=False, capture_sizes=listed)
    assert listed == [32, 8, 8, 16]


@everywhere
@pytest.mark.parametrize("order", [(8, 16, 32), (32, 16, 8), (16, 32, 8)], ids=str)
def test_b34_capture_order_does_not_matter(setup: Setup, order: tuple[int, ...]) -> None:
    check(setup, two_results, x_only, sizes=[n for n in order for _ in range(2)] + list(order) * 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0, 8], r"option capture_sizes has 0; a token count is an integer of at least 1"),
        ([8, -1], r"option capture_sizes has -1; a token count is an integer of at least 1"),
        ([8.0], r"option capture_sizes has 8.0; a token count is an integer of at least 1"),
        ([True], r"option capture_sizes has True; a token count is an integer of at least 1"),
        ([], r'option capture_sizes=\[\] names no size: leave it out .*, or set engine="off" to capture none'),
        ({8}, r"capture_sizes=\{8\} must be a list of token counts"),
        (8, r"capture_sizes=8 must be a list of token counts"),
        ("8", r"capture_sizes='8' must be a list of token counts"),
    ],
)
def test_b34_invalid_sizes_are_refused(sizes: object, message: str) -> None:
    compiled = torch.compile(two_results, backend="dsv4_piecewise", options={"capture_sizes": sizes})
    with pytest.raises(OptionError, match=message):
        compiled(rows(8))
