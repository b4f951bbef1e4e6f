"""Cases about where the graph is cut: containers and sizes at a boundary, order, empty pieces, nested graphs."""

from __future__ import annotations

import weakref

import pytest
import torch
import toy_ops
from case_helpers import (
    Pair,
    Setup,
    assert_same,
    check,
    crossing,
    each_captured_once,
    everywhere,
    everywhere_and_compiled,
    kinds,
    reasons,
    rows,
)
from torch import Tensor
from toy_ops import SPLIT, Host

toy = torch.ops.toy


def x_only(n: int) -> tuple[Tensor]:
    return (rows(n),)


@everywhere
def test_b01_tuple_of_a_split_op(setup: Setup) -> None:
    def f(x):
        a, b = toy.tup(x)
        return toy.fresh(a) + b

    check(setup, f, x_only)
    assert "number" not in crossing(setup.explain(f, rows(8)))  # a container has no layout


@everywhere
def test_b01_list_of_three_items_one_unused(setup: Setup) -> None:
    def f(x):
        a, _, c = toy.three(x)
        return a * 3 + c

    check(setup, f, x_only)
    (region,) = setup.explain(f, rows(8)).regions
    assert len(region.outputs) == 2


@everywhere
def test_b01_unused_item_is_not_kept_alive(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    dead: list[bool] = []

    def make_and_remember(q):
        items = [q + 1, 2 * q, q - 1]
        made[:] = [weakref.ref(item) for item in items]
        return items

    def look(q):
        dead.append(made[1]() is None)
        return q

    monkeypatch.setattr(toy_ops, "make_three", make_and_remember)
    monkeypatch.setattr(Host, "function", staticmethod(look))

    def f(x):
        a, _, c = toy.three(x)
        y = (a + c).relu()
        out = torch.empty_like(y)
        toy.hook(y, out)
        return out + 1

    pair = Pair(f, setup, split_ops=(*SPLIT, "toy::hook"))
    with torch.no_grad():
        for n in (8, 16, 8, 16, 8, 16):
            pair.compiled(rows(n))
    assert dead == [True] * 6


@everywhere
def test_b01_item_consumed_two_splits_later(setup: Setup) -> None:
    def f(x):
        a, b = toy.tup(x)
        h = toy.fresh(a.sin())
        h = toy.fresh(h.cos())
        return h + b

    check(setup, f, x_only)


@everywhere
def test_b01_item_consumed_only_by_the_output(setup: Setup) -> None:
    def f(x):
        a, b = toy.tup(x.sin())
        return a * 2, b

    check(setup, f, x_only)


@everywhere
def test_b01_nested_split_on_an_item(setup: Setup) -> None:
    def f(x):
        a, b = toy.tup(x + 1)
        c, d = toy.tup(b)
        return a + c, toy.three(d)[2].exp()

    check(setup, f, x_only)
    assert "number" not in crossing(setup.explain(f, rows(8)))


@everywhere
def test_b13_size_object_used_by_view(setup: Setup) -> None:
    def f(x):
        s = x.size()
        h = x * 2
        o = torch.empty_like(h)
        toy.attn(h, o)
        return o.view(s) + 1

    check(setup, f, x_only)
    assert "number" not in crossing(setup.explain(f, rows(8)))


@everywhere
def test_b13_size_object_sliced_and_unpacked(setup: Setup) -> None:
    def f(x):
        s = x.size()
        h = x * 2
        o = torch.empty_like(h)
        toy.attn(h, o)
        return o.view(*s[:-1], 2, -1) + 1

    pair = check(setup, f, x_only)
    assert pair(rows(8)).shape == (8, 2, 2)


@everywhere
def test_b13_size_of_an_activation_used_behind_the_split(setup: Setup) -> None:
    def f(x):
        h = torch.cat([x, x]) * 2
        shape, count = h.shape, h.numel()
        y = toy.fresh(h)
        return y.reshape(count // 4, 4) + torch.ones(shape), h.size()

    check(setup, f, x_only)


@everywhere
@pytest.mark.parametrize("region", ["narrow", "wide", "minimal"])
def test_b26_side_effects_keep_their_order(setup: Setup, region: str) -> None:
    def f(x):
        o = torch.zeros_like(x)
        toy.attn(x, o)
        y = x * 3
        x.add_(1)
        toy.tick(x)
        z = x + 1
        toy.tick(z)
        return o + y, z

    pair = Pair(f, setup, region=region)
    for n in (8, 16, 8, 16, 8, 16):
        toy_ops.LOG.clear()
        pair(rows(n))
        eager, compiled = toy_ops.LOG[:2], toy_ops.LOG[2:]
        assert eager == compiled


@everywhere
def test_b44_allocation_between_split_ops_makes_no_piece(setup: Setup) -> None:
    def f(x):
        o = torch.empty_like(x)
        toy.attn(x, o)
        toy.tick(o)
        o2 = torch.empty_like(o)
        toy.attn(o, o2)
        return o2

    check(setup, f, x_only, steady=False)
    assert kinds(setup.explain(f, rows(8))) == "r"


@everywhere
def test_b44_allocation_does_not_drag_compute_into_the_region(setup: Setup) -> None:
    def f(x):
        o = torch.empty_like(x)
        o2 = torch.empty_like(x)
        toy.attn(x, o)
        h = o.sin()
        toy.attn(h, o2)
        return o2.cos()

    check(setup, f, x_only)
    plan = setup.explain(f, rows(8))
    assert kinds(plan) == "rprp"
    assert [op.op for unit in plan.regions for op in unit.ops] == ["toy::attn", "toy::attn"]


@everywhere
def test_b44_adjacent_split_ops_share_a_region(setup: Setup) -> None:
    def f(x):
        return toy.fresh(toy.fresh(x.sin())).cos()

    check(setup, f, x_only)
    assert kinds(setup.explain(f, rows(8))) == "prp"


@everywhere
def test_b44_whole_graph_is_one_split_op(setup: Setup) -> None:
    def f(x):
        return toy.fresh(x)

    check(setup, f, x_only, steady=False)
    assert kinds(setup.explain(f, rows(8))) == "r"


@everywhere
def test_b44_graph_without_split_op(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    def f(x):
        return (x.sin() * 2).cos()

    with caplog.at_level("WARNING", logger="dsv4_compile"):
        check(setup, f, x_only, split_ops=())
    assert [record.getMessage() for record in caplog.records] == [
        "the graph calls no split op: nothing in it is kept eager for attention"
    ]
    assert kinds(setup.explain(f, rows(8))) == "p"


@everywhere
def test_b44_only_views_between_splits(setup: Setup) -> None:
    def f(x):
        h = toy.fresh(x.exp())
        h = toy.fresh(h[:, 1:].t().unsqueeze(0).squeeze(0))
        return h.reshape(-1).neg()

    check(setup, f, x_only)
    assert kinds(setup.explain(f, rows(8))) == "prp"


@everywhere
def test_b44_function_returning_its_input(setup: Setup) -> None:
    def f(x):
        return x, toy.fresh(x.exp()), x[1:]

    pair = check(setup, f, x_only)
    x = rows(8)
    assert pair(x)[0] is x


@everywhere
def test_b44_nothing_but_the_input(setup: Setup) -> None:
    pair = Pair(lambda x: x.view(-1), setup)
    for n in (8, 16, 8, 16, 8, 16):
        pair(rows(n))


class Branching(torch.nn.Module):
    """A `cond` between two split ops, with a parameter in its branches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = toy.fresh(x.sin())
        h = torch.cond(h.sum() > 0, lambda h: h * self.weight, lambda h: h - self.weight, (h,))
        return toy.fresh(h).cos()


@everywhere
def test_b46_cond_between_split_ops_is_not_frozen(setup: Setup) -> None:
    model = Branching()
    pair = Pair(model, setup)
    for n in (8, 16) * 4:
        for sign in (1, -1):
            pair(sign * rows(n).abs())
    why = reasons(setup.explain(model, rows(8)))
    assert why["cond"] == "higher-order op cond decides on the host what it runs"


class Constants(torch.nn.Module):
    """A tensor attribute that is no buffer, used in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        h = toy.fresh(x * self.table)
        return h + self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])


@everywhere
def test_b46_constant_tensor_in_two_pieces(setup: Setup) -> None:
    check(setup, Constants(), x_only)


@everywhere
def test_b46_checkpoint_with_a_split_op_inside_is_captured_around_it(setup: Setup) -> None:
    def body(h):
        return toy.fresh(h.sin()) + 1

    def f(x):
        h = torch.utils.checkpoint.checkpoint(body, x * 2, use_reentrant=False)
        return h.cos()

    check(setup, f, x_only)
    plan = setup.explain(f, rows(8))
    assert kinds(plan) == "prp"
    assert reasons(plan) == {"toy::fresh": "split op"}


@everywhere
def test_b46_cond_with_a_split_op_inside_runs_eager(setup: Setup) -> None:
    def f(x):
        h = torch.cond(x.sum() > 0, lambda h: toy.fresh(h).clone(), lambda h: h - 1, (x.sin(),))
        return h.cos()

    pair = Pair(f, setup)
    for n in (8, 16) * 3:
        pair(rows(n).abs())
        pair(-rows(n).abs())
    assert reasons(setup.explain(f, rows(8)))["cond"] == "runs the split op toy::fresh.default inside"


@everywhere
def test_b48_single_output_keeps_its_rows(setup: Setup) -> None:
    def f(x):
        return toy.fresh(x + 1) * 2

    pair = check(setup, f, x_only)
    assert pair(rows(8)).shape == (8, 4)


@everywhere_and_compiled
@pytest.mark.parametrize("rebind", [False, True])
def test_b48_pieces_with_no_one_and_two_outputs(setup: Setup, rebind: bool) -> None:
    def f(x, cache):
        a, b = x.sin(), x.cos()  # two outputs
        h = toy.fresh(a) if rebind else toy.fresh(a + 1)
        cache.add_(h.sum())  # none
        toy.tick(cache)
        y = toy.fresh(b * h)
        return y.exp()  # one

    cache = torch.zeros(3)
    toy_ops.LOG.clear()
    check(setup, f, lambda n: (rows(n), cache))
    expected, actual = torch.tensor(toy_ops.LOG[0::2]), torch.tensor(toy_ops.LOG[1::2])
    assert_same(actual, expected, tolerant=setup.tolerant)


@everywhere
def test_b48_numbers_none_and_nests_among_outputs(setup: Setup) -> None:
    def f(x, k: int):
        h = toy.fresh(x + k)
        return {"h": h, "nothing": None, "pair": (x.shape[0], [h * 2, k]), "twice": 2 * x.shape[0]}, None, h.size(0)

    sizes = (8, 16, 8, 16, 8, 16)
    pair = Pair(f, setup)
    with each_captured_once(setup, sizes):
        for n in sizes:
            result = pair(rows(n), 3)
            assert result[2] == n
            assert_same(result[0]["pair"][0], n)
