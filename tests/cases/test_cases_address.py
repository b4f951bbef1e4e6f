"""Cases about addresses: fresh tensors, outputs, workspaces, buffers and weights that move or are handed out twice."""

from __future__ import annotations

import copy
import gc
from collections import Counter

import pytest
import torch
from case_helpers import (
    Pair,
    Setup,
    assert_same,
    captured,
    check,
    each_captured_once,
    everywhere,
    everywhere_and_compiled,
    rows,
)
from torch import Tensor
from toy_ops import SPLIT, Host

import dsv4_compile

toy = torch.ops.toy
FIVE_EACH = (8, 8, 16, 8, 16, 8, 16, 8, 16, 16)


def x_only(n: int) -> tuple[Tensor]:
    return (rows(n),)


@everywhere
@pytest.mark.parametrize("op", ["fresh", "pingpong", "offset_view"])
def test_b02_fresh_result_between_two_pieces(setup: Setup, op: str) -> None:
    def f(x):
        return getattr(toy, op)(x.sin()).cos() + 1

    check(setup, f, x_only, sizes=FIVE_EACH, split_ops=(*SPLIT, f"toy::{op}"))


@everywhere
def test_b02_two_fresh_results_alive_at_once(setup: Setup) -> None:
    def f(x):
        a = toy.fresh(x.sin())
        b = toy.fresh(a.cos())
        return toy.fresh(a - b) + a

    check(setup, f, x_only, sizes=FIVE_EACH)


def layer(x: Tensor) -> Tensor:
    return toy.fresh(x.sin()) * 3


@everywhere
def test_b11_output_survives_the_next_call(setup: Setup) -> None:
    pair = Pair(layer, setup)
    kept = []
    for n in (8, 16) * 4:
        y = pair(rows(n))
        kept.append((y, y.clone()))
    for y, copied in kept:
        assert torch.equal(y, copied)


@everywhere
@pytest.mark.parametrize("view", [lambda y: y[1:].t(), lambda y: y.detach()], ids=["view", "detach"])
def test_b11_view_of_an_output_survives(setup: Setup, view) -> None:
    pair = Pair(layer, setup)
    for n in (8, 16) * 4:
        y = view(pair(rows(n)))
        copied = y.clone()
        pair(rows(n))
        assert torch.equal(y, copied)


@everywhere
def test_b11_output_fed_back(setup: Setup) -> None:
    pair = Pair(lambda x: toy.fresh(x.sin()) * 0.7, setup)
    for n in (8, 16, 8):
        y = rows(n)
        for _ in range(4):
            y = pair(y)


@everywhere
def test_b11_one_of_two_outputs_held(setup: Setup) -> None:
    pair = Pair(lambda x: (toy.fresh(x.sin()).exp(), x.cos() + 1), setup)
    held = []
    for n in (8, 16) * 4:
        held.append(pair(rows(n))[1])
        copied = held[-1].clone()
        pair(rows(n))
        assert torch.equal(held[-1], copied)


@everywhere
def test_b11_outputs_that_share_memory_keep_sharing_it(setup: Setup) -> None:
    def f(x):
        y = toy.fresh(x.sin()) * 3
        return y, y[1:], y.view(-1)

    pair = check(setup, f, x_only)
    y, tail, flat = pair(rows(8))
    y.zero_()
    assert not tail.any()
    assert not flat.any()


@captured
def test_b11_static_outputs_are_asked_for_and_seen(setup: Setup) -> None:
    pair = Pair(layer, setup, static_outputs=True)
    for n in (8, 16, 8, 16):
        pair(rows(n))
    with torch.no_grad():
        first, other, second = (pair.compiled(rows(n)) for n in (8, 16, 8))
    assert first.data_ptr() == second.data_ptr() != other.data_ptr()


@everywhere
def test_b22_small_bucket_after_larger_ones(setup: Setup) -> None:
    check(setup, two_layers, x_only, sizes=(8, 8, 8, 32, 32, 8, 64, 64, 32, 8, 200, 200, 8, 64, 32, 200))


def two_layers(x: Tensor) -> Tensor:
    a, b = x.sin(), x.cos()
    h = toy.fresh(a) + b
    return toy.fresh(h.exp()) + h - a


@everywhere
@pytest.mark.parametrize("bound", [{"capture_sizes": [8, 16]}, {"max_tokens": 16}], ids=["listed", "bounded"])
def test_b22_larger_call_outside_the_buckets(setup: Setup, bound: dict[str, object]) -> None:
    sizes = (8, 8, 300, 8, 16, 16, 500, 16, 8, 300)
    pair = Pair(two_layers, setup, **bound)
    for n in sizes:
        pair(rows(n))
    if setup.captures:
        with dsv4_compile.counters.expect(captures=0, recaptures=0, uncaptured_calls=1):
            for n in (8, 16, 700):
                pair(rows(n))


@everywhere
def test_b23_two_values_in_one_op(setup: Setup) -> None:
    def f(x):
        a, b = toy.tup(x.sin())
        c, d = toy.tup(b.cos())
        return toy.fresh(a * c) + b * d

    check(setup, f, x_only)


@everywhere
def test_b23_two_compiled_graphs(setup: Setup) -> None:
    first, second = Pair(two_layers, setup), Pair(lambda x: two_layers(x) + toy.fresh(x.exp()), setup)
    for n in (8, 16, 8, 16, 8, 16):
        x = rows(n)
        first(x)
        second(x)


@everywhere
def test_b23_two_layers_of_other_widths(setup: Setup) -> None:
    def f(x, narrow, wide):
        h = toy.fresh(x @ wide).relu()
        k = toy.fresh(h @ narrow).relu()
        return h.sum(1), toy.fresh(k.exp()) + k

    wide, narrow = rows(4, 24), rows(24, 4)
    check(setup, f, lambda n: (rows(n), narrow, wide))


@everywhere_and_compiled
def test_b23_two_dtypes(setup: Setup) -> None:
    def f(x):
        a, b, c = x.sin(), x.double().cos(), (x * 10).to(torch.int8)
        y, z = toy.fresh(a), toy.fresh(b)
        return y + a, toy.fresh(z) + b, toy.fresh(c) + c

    check(setup, f, x_only)


@everywhere
def test_b23_compiled_function_called_inside_a_split_op(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = torch.compile(two_layers, backend="dsv4_piecewise", dynamic=True, options=setup.options())
    monkeypatch.setattr(Host, "function", staticmethod(lambda q: inner(q)))

    def f(x):
        h, k = x.sin(), x.cos()
        out = torch.empty_like(h)
        toy.hook(h, out)
        return out * k + h

    pair = Pair(f, setup, split_ops=(*SPLIT, "toy::hook"))
    for n in (8, 16) * 4:
        pair(rows(n))


@everywhere
def test_b23_recursive_call_inside_a_split_op(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x, depth):
        h, k = x.sin(), x.cos()
        out = torch.empty_like(h)
        toy.hook(torch.cat([h, depth]), out)
        return out * k + h

    pair = Pair(f, setup, split_ops=(*SPLIT, "toy::hook"))
    target = {"f": f}

    def again(q):
        h, depth = q[:-1], q[-1:]
        return target["f"](h, depth - 1) if depth[0, 0] > 0 else h + 1

    monkeypatch.setattr(Host, "function", staticmethod(again))
    for n in (8, 16) * 4:
        x, depth = rows(n), torch.full((1, 4), 2.0)
        with torch.no_grad():
            target["f"] = f
            expected = f(x, depth)
            target["f"] = pair.compiled
            assert_same(pair.compiled(x, depth), expected, tolerant=setup.tolerant)


@everywhere
@pytest.mark.parametrize("splits", [True, False], ids=["eager", "captured"])
def test_b24_indexer_that_allocates_its_result(setup: Setup, splits: bool) -> None:
    def f(x, cache):
        topk = toy.topk(x.sin(), cache)
        out = torch.empty_like(x)
        toy.mqa(x, cache, topk, torch.arange(x.shape[0] + 1), out)
        return out.cos()

    cache = rows(24)
    split_ops = (*SPLIT, "toy::topk") if splits else SPLIT
    check(setup, f, lambda n: (rows(n), cache), sizes=FIVE_EACH, split_ops=split_ops)


class Reloaded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("derived", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(toy.fresh(self.first(x)) * self.derived)


def load_in_place(model: Reloaded) -> None:
    model.load_state_dict(Reloaded().state_dict())


def load_assigning(model: Reloaded) -> None:
    model.load_state_dict(Reloaded().state_dict(), assign=True)


def set_data(model: Reloaded) -> None:
    model.first.weight.data = rows(4)


def set_parameter(model: Reloaded) -> None:
    model.second.weight = torch.nn.Parameter(rows(4))


def rebuild_buffer(model: Reloaded) -> None:
    model.derived = model.first.weight.detach().sum(0)


def change_dtype(model: Reloaded) -> None:
    model.to(torch.float64)


RELOADS = [load_in_place, load_assigning, set_data, set_parameter, rebuild_buffer, change_dtype]


@pytest.mark.sampled(5)
@everywhere
@pytest.mark.parametrize("reload", RELOADS, ids=lambda reload: reload.__name__)
def test_b41_weights_reloaded_after_capture(setup: Setup, reload) -> None:
    model = Reloaded()
    pair = Pair(model, setup)
    for n in (8, 16) * 3:
        pair(rows(n))
    before = dsv4_compile.counters.captures
    for first in (True, False):
        reload(model)
        for n in (8, 16) * 3:
            pair(rows(n).to(model.derived.dtype))
        if setup.captures and first:
            assert dsv4_compile.counters.captures - before == (0 if reload is load_in_place else 2)


@pytest.mark.sampled(3)
@everywhere
def test_b40_reset_and_a_second_model(setup: Setup) -> None:
    alive = []
    for _ in range(3):
        pair = Pair(Reloaded(), setup)
        with each_captured_once(setup, (8, 16) * 3):
            for n in (8, 16) * 3:
                pair(rows(n))
        del pair
        torch._dynamo.reset()
        gc.collect()
        # torch itself leaves its fake tensors behind, whatever the backend
        types = Counter(map(type, gc.get_objects()))
        alive.append(types[Tensor] + types[torch.nn.Parameter])
    assert alive[0] == alive[1] == alive[2]


@everywhere
def test_b40_same_module_again_after_reset(setup: Setup) -> None:
    model = Reloaded()
    for _ in range(3):
        pair = Pair(model, setup)
        with each_captured_once(setup, (8, 16) * 3):
            for n in (8, 16) * 3:
                pair(rows(n))
        torch._dynamo.reset()


@everywhere
def test_b41_two_instances_of_one_class_keep_their_weights(setup: Setup) -> None:
    model = Reloaded()
    pairs = [Pair(model, setup), Pair(copy.deepcopy(model), setup), Pair(Reloaded(), setup)]
    for n in (8, 16) * 3:
        for pair in pairs:
            pair(rows(n))
