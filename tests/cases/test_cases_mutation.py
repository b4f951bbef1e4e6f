"""Cases about memory that is written or shared: mutated inputs, views, ops that return what they were given."""

from __future__ import annotations

import pytest
import torch
from case_helpers import Pair, Setup, check, equal_or_refused, everywhere, everywhere_and_compiled, rows
from torch import Tensor
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile.errors import AliasingOpError

toy = torch.ops.toy


def x_only(n: int) -> tuple[Tensor]:
    return (rows(n),)


@everywhere
@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
def test_b06_cache_of_the_user(setup: Setup, moves: bool) -> None:
    def f(x, cache):
        cache[: x.shape[0]].add_(x)
        return toy.fresh(cache.sum(0)) + x

    cache = torch.zeros(64, 4)
    pair = check(setup, f, lambda n: (rows(n), torch.zeros(64, 4) if moves else cache), steady=False)
    if not moves:
        before = dsv4_compile.counters.recaptures
        pair(rows(8), cache)
        assert dsv4_compile.counters.recaptures == before


@everywhere
def test_b06_cache_marked_static(setup: Setup) -> None:
    def f(x, cache):
        cache[: x.shape[0]].add_(x)
        return toy.fresh(cache.sum(0)) + x

    cache = torch.zeros(64, 4)
    torch._dynamo.mark_static_address(cache)
    check(setup, f, lambda n: (rows(n), cache))


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(64, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache[: x.shape[0]].add_(x)
        return toy.fresh(self.cache.sum(0)) + x


@everywhere
def test_b06_cache_is_a_buffer(setup: Setup) -> None:
    model = Cached()
    check(setup, model, x_only)
    assert model.cache.abs().sum() > 0


@everywhere
@pytest.mark.parametrize("reused", [False, True])
def test_b06_activation_input(setup: Setup, reused: bool) -> None:
    def f(x):
        x.add_(1)
        y = toy.fresh(x.exp())
        x.mul_(y)
        return y - 1

    kept = {n: rows(n) for n in (8, 16, 32)}
    check(setup, f, lambda n: (kept[n] if reused else rows(n),), steady=False)


@everywhere
@pytest.mark.parametrize("how", ["index_put_", "setitem", "index_copy_"])
def test_b06_rows_written_through_slots(setup: Setup, how: str) -> None:
    def f(x, slots, cache):
        if how == "index_put_":
            cache.index_put_((slots,), x)
        elif how == "setitem":
            cache[slots] = x
        else:
            cache.index_copy_(0, slots, x)
        return toy.fresh(cache[slots]) + 1

    cache = torch.zeros(64, 4)
    check(setup, f, lambda n: (rows(n), torch.randperm(64)[:n], cache), steady=False)


@everywhere
def test_b06_two_inputs_that_overlap_in_later_calls(setup: Setup) -> None:
    def f(x, cache):
        cache[: x.shape[0]].add_(1)
        return toy.fresh(x.exp()) + cache[: x.shape[0]]

    cache = torch.zeros(64, 4)
    pair = Pair(f, setup)
    for n in (8, 16) * 3:
        pair(rows(n), cache)
        pair(cache[4 : 4 + n], cache)


@everywhere
def test_b08_view_mutated_after_split(setup: Setup) -> None:
    def f(x):
        h = x + 1
        v = h[:, :2]
        y = toy.fresh(h)
        v.add_(y[:, :2])
        return toy.fresh(h)

    check(setup, f, x_only)


@everywhere
def test_b08_base_mutated_after_split_and_read_through_the_view(setup: Setup) -> None:
    def f(x):
        h = x + 1
        v = h[:, :2].t()
        y = toy.fresh(h)
        h.mul_(y)
        return v.exp(), h

    check(setup, f, x_only)


@everywhere
def test_b08_chunk_of_a_projection_mutated_by_the_split_op(setup: Setup) -> None:
    def f(x, w):
        fused = x @ w
        q, k, v = torch.split(fused, [4, 3, 3], dim=-1)
        toy.attn(k, v)
        return fused.sum(0), toy.fresh(q) + fused[:, 4:8]

    w = rows(4, 10)
    check(setup, f, lambda n: (rows(n), w))


@everywhere_and_compiled
def test_b08_view_through_two_splits(setup: Setup) -> None:
    def f(x):
        h = x.exp()
        v = h.view(-1)[2:].unsqueeze(0)
        y = toy.fresh(h)
        v.neg_()
        z = toy.fresh(y + h)
        v.mul_(2)
        return z, h, v

    check(setup, f, x_only)


@everywhere
def test_b08_view_of_an_input_mutated_after_split(setup: Setup) -> None:
    def f(x):
        v = x[1:]
        y = toy.fresh(x.exp())
        v.sub_(y[1:])
        return toy.fresh(x), v

    check(setup, f, x_only, steady=False)


@everywhere
def test_b28_op_that_returns_its_buffer_is_refused_by_name(setup: Setup) -> None:
    def f(x):
        buf = torch.zeros_like(x)
        result = toy.liar(x.exp(), buf)
        buf.add_(1)
        return toy.fresh(result)

    pair = Pair(f, setup)
    for n in (8, 16, 8):
        with pytest.raises(
            AliasingOpError,
            match=r"op toy::liar\.default returns memory of its argument 'buf', but its schema promises",
        ):
            pair(rows(n))


def returns_its_buffer_for_some_sizes(setup: Setup, split_ops: tuple[str, ...]) -> None:
    def f(x):
        buf = torch.zeros_like(x)
        result = toy.sometimes(x.exp(), buf)
        buf.add_(1)
        return toy.fresh(result) + result

    pair = Pair(f, setup, split_ops=split_ops)
    for n in (8, 16, 8, 16, 8, 16):
        equal_or_refused(pair, "toy::sometimes", rows(n))


@everywhere
def test_b28_captured_op_that_returns_its_buffer_for_some_sizes(setup: Setup) -> None:
    returns_its_buffer_for_some_sizes(setup, SPLIT)


@everywhere
def test_b28_split_op_that_returns_its_buffer_for_some_sizes(setup: Setup) -> None:
    returns_its_buffer_for_some_sizes(setup, (*SPLIT, "toy::sometimes"))


def test_b28_own_ops_return_nothing() -> None:
    ops = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dsv4::")}
    assert len(ops) == 7
    for name in ops:
        (schema,) = torch._C._jit_get_schemas_for_operator(name)
        assert schema.returns == []


def other_layout_than_its_fake(setup: Setup, op: str, split_ops: tuple[str, ...]) -> None:
    def f(x):
        h = getattr(toy, op)(x.exp())
        y = toy.fresh(h * 2)
        return y + 1, h.amax(0)  # a sum would take its terms in the order of the strides

    pair = Pair(f, setup, split_ops=split_ops)
    for n in (8, 16, 8, 16, 8, 16):
        equal_or_refused(pair, f"toy::{op}", rows(n))


@everywhere
@pytest.mark.parametrize("split_ops", [SPLIT, (*SPLIT, "toy::transposed")], ids=["captured", "eager"])
def test_b43_strides_of_the_fake_differ(setup: Setup, split_ops: tuple[str, ...]) -> None:
    other_layout_than_its_fake(setup, "transposed", split_ops)


@everywhere
def test_b43_dtype_of_the_fake_of_a_captured_op_differs(setup: Setup) -> None:
    other_layout_than_its_fake(setup, "widened", SPLIT)


@everywhere
def test_b43_dtype_of_the_fake_of_a_split_op_differs(setup: Setup) -> None:
    other_layout_than_its_fake(setup, "widened", (*SPLIT, "toy::widened"))


@everywhere
def test_b43_odd_width_crosses_as_chunks(setup: Setup) -> None:
    def f(x, w):
        q, k = torch.split(x @ w, [37, 11], dim=-1)
        y = toy.fresh(q)
        return (y * 2)[:, :11] + k, toy.fresh(k.t()).t()

    w = rows(4, 48)
    check(setup, f, lambda n: (rows(n), w))
