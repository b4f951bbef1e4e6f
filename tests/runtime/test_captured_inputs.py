"""Inputs of captured calls that are written, that move, or that overlap each other: always as in eager.

`Pair` compares the arguments after each call with those of an eager call on copies, which share memory as they do.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from case_helpers import Pair, rows
from runtime_helpers import HOST, compile_host, the_owner
from torch import Tensor, nn
from written_inputs import accumulate, static, toy

from dsv4_compile import counters
from dsv4_compile.graph.partitioned import InputRole


def role_of(name: str) -> InputRole:
    owner = the_owner()
    return next(owner._roles[i.node] for i in owner._graph.traced.inputs if i.name == name)


# written inputs


@pytest.mark.parametrize("role", [InputRole.STATIC, InputRole.BOUND])
def test_a_written_input_that_stays_put_is_written_in_place(role: InputRole) -> None:
    pair = Pair(accumulate, HOST)
    cache = torch.zeros(16, 4) if role is InputRole.BOUND else static(torch.zeros(16, 4))
    with counters.expect(captures=2, recaptures=0, replays=10, uncaptured_calls=2):
        for n in (5, 6) * 6:
            pair(rows(n), cache)
    assert role_of("cache") is role


def test_written_input_that_moves_now_and_then_is_captured_again() -> None:
    pair = Pair(accumulate, HOST)
    for expected in ({"captures": 1, "recaptures": 0}, {"captures": 1, "recaptures": 1}):
        cache = torch.zeros(16, 4)
        with counters.expect(**expected):
            for _ in range(4):
                pair(rows(5), cache)
    assert role_of("cache") is InputRole.BOUND


def test_written_input_that_keeps_moving_is_staged_and_written_back() -> None:
    pair = Pair(accumulate, HOST)
    for _ in range(6):
        pair(rows(5), torch.randn(16, 4))
    assert role_of("cache") is InputRole.COPIED_OUT
    with counters.expect(captures=0, replays=6, uncaptured_calls=0):
        for _ in range(6):
            pair(rows(5), torch.randn(16, 4))
    cache = torch.randn(16, 4)
    with counters.expect(captures=1, replays=5, uncaptured_calls=1):
        for _ in range(6):
            pair(rows(6), cache)


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_written_inputs_without_an_address_check(marked: bool) -> None:
    """It trusts what is said of marked inputs; of the others nothing was said, so they may be anywhere."""
    pair = Pair(accumulate, HOST, check="off")
    caches = [torch.zeros(16, 4) for _ in range(6)]
    for cache in caches:
        pair(rows(5), static(caches[0]) if marked else cache)
    assert role_of("cache") is (InputRole.STATIC if marked else InputRole.COPIED_OUT)
    with counters.expect(captures=0, replays=6):
        for cache in caches:
            pair(rows(5), caches[0] if marked else cache)


def test_written_activation() -> None:
    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return toy.fresh(x.exp()) + x

    pair = Pair(f, HOST)
    for n in (5, 6) * 6:
        pair(rows(n))
    with counters.expect(captures=0, replays=4):
        for n in (5, 6) * 2:
            pair(rows(n))


def test_input_written_only_by_an_eager_op() -> None:
    def f(x: Tensor, out: Tensor) -> Tensor:
        toy.attn(x.sin(), out)
        return x + 1

    pair = Pair(f, HOST)
    with counters.expect(captures=1, recaptures=0, replays=7, uncaptured_calls=1):
        for _ in range(8):
            pair(rows(5), rows(5))
    assert role_of("out") is InputRole.DIRECT


def test_input_written_by_an_eager_op_and_read_by_a_piece() -> None:
    def f(x: Tensor, out: Tensor) -> Tensor:
        toy.attn(x.sin(), out)
        return out.cos() + x

    pair = Pair(f, HOST)
    for _ in range(8):
        pair(rows(5), rows(5))
    with counters.expect(captures=0, replays=2):
        pair(rows(5), rows(5))
        pair(rows(5), rows(5))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "write",
    [
        lambda c, x, s: c.index_put_((s,), x),
        lambda c, x, s: c.index_copy_(0, s, x),
        lambda c, x, s: c.__setitem__(s, x),
        lambda c, x, s: c.t().mul_(2),
        lambda c, x, s: torch.mul(c, 3, out=c),
        lambda c, x, s: c.view(-1).fill_(0.5),
        lambda c, x, s: toy.kv_write(x, s, c),
    ],
    ids=["index_put", "index_copy", "setitem", "transposed", "out", "flat", "custom_op"],
)
@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
def test_ways_to_write_a_cache(write: Callable[[Tensor, Tensor, Tensor], object], moves: bool) -> None:
    def f(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        write(cache, x, slots)
        return toy.fresh(x) + cache.mean()

    pair = Pair(f, HOST)
    kept = torch.randn(16, 4)
    for n in (5, 6) * 5:
        pair(rows(n), torch.randperm(16)[:n], torch.randn(16, 4) if moves else kept)


def test_view_of_a_larger_tensor_is_written() -> None:
    pair = Pair(accumulate, HOST)
    large = torch.randn(40, 4)
    for start in (0, 8, 16, 8, 24, 0, 1):
        pair(rows(5), large[start : start + 16])


def test_same_tensor_twice() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return toy.fresh(x) + y

    pair = Pair(f, HOST)
    for _ in range(4):
        x = rows(5)
        pair(x, x)
        pair(x, rows(5))


def test_bound_input_of_one_bucket_and_another() -> None:
    """Each bucket binds the cache where it saw it."""
    pair = Pair(accumulate, HOST)
    caches = {5: torch.zeros(16, 4), 6: torch.zeros(16, 4)}
    with counters.expect(captures=2, recaptures=0):
        for n in (5, 6) * 5:
            pair(rows(n), caches[n])


# inputs that overlap


def add_both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x is written before the split op, y read after it."""
    x.mul_(2)
    h = toy.fresh(x + 1)
    return h, y + h[: y.shape[0]]


def overlapping(size: int = 5, shift: int = 2) -> tuple[Tensor, Tensor]:
    memory = rows(size + shift)
    return memory[:size], memory[shift : shift + 3]


def test_overlap_in_every_call() -> None:
    pair = Pair(add_both, HOST)
    for _ in range(6):
        pair(*overlapping())


def test_overlap_that_comes_after_the_capture() -> None:
    pair = Pair(add_both, HOST)
    for _ in range(6):  # x turns out to move
        pair(rows(5), rows(3))
    with counters.expect(captures=0, uncaptured_calls=3, replays=3):
        for _ in range(3):
            pair(*overlapping())
            pair(rows(5), rows(3))


def test_overlap_first_and_none_later() -> None:
    pair = Pair(add_both, HOST)
    for make in (overlapping, overlapping, lambda: (rows(5), rows(3))) * 3:
        pair(*make())


def test_neighbours_do_not_overlap() -> None:
    pair = Pair(add_both, HOST)
    for _ in range(6):
        pair(rows(5), rows(3))
    with counters.expect(uncaptured_calls=0, replays=3):
        for _ in range(3):
            memory = rows(8)
            pair(memory[:5], memory[5:])


def test_overlap_with_a_static_input_that_is_written() -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        h = toy.fresh(x * 2)
        return h + x

    pair = Pair(f, HOST)
    cache = static(torch.zeros(16, 4))
    for _ in range(3):
        pair(rows(5), cache)
    with counters.expect(captures=0, uncaptured_calls=2, replays=2):
        for _ in range(2):
            pair(cache[3:8], cache)
            pair(rows(5), cache)


def test_overlap_with_a_static_input_that_is_only_read_is_fine() -> None:
    pair = Pair(lambda x, table: toy.fresh(x * 2) + table[: x.shape[0]], HOST)
    table = static(torch.randn(16, 4))
    for _ in range(3):
        pair(rows(5), table)
    with counters.expect(uncaptured_calls=0, replays=2):
        pair(table[3:8], table)
        pair(table[1:6], table)


def test_written_input_overlaps_a_weight() -> None:
    """Both are read at their own address; the written one moves and is the weight's own memory."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, 4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return toy.fresh(x) * self.w[: x.shape[0]]

    model, eager = Scale(), Scale()
    compiled = compile_host(model)
    for start in (None, None, None, None, None, 2, 0, None, 2):
        x = rows(5)
        given, wanted = (x, x.clone()) if start is None else (m.w.data[start : start + 5] for m in (model, eager))
        with torch.no_grad():
            assert torch.equal(compiled(given), eager(wanted))
        assert torch.equal(model.w, eager.w)
        assert torch.equal(given, wanted)


def test_two_written_inputs_trade_places() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        h = toy.fresh(a)
        b.sub_(h)
        return h + b

    pair = Pair(f, HOST)
    a, b = rows(5), rows(5)
    for _ in range(4):
        pair(a, b)
        pair(b, a)
        a, b = b, a


def test_strided_written_input() -> None:
    pair = Pair(add_both, HOST)
    for _ in range(7):
        pair(rows(4, 5).t(), rows(3))
    interleaved = rows(10)
    for _ in range(3):
        pair(interleaved[::2], interleaved[1::2][:3])  # ranges meet, elements do not


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda n: rows(1).expand(n, 4), id="one row"),
        pytest.param(lambda n: rows(n, 1).expand(n, 4), id="one column"),
        pytest.param(lambda n: rows(n + 3, 1).unfold(0, 4, 1)[:n, 0], id="windows"),
    ],
)
def test_input_whose_elements_share_memory(make: Callable[[int], Tensor]) -> None:
    pair = Pair(lambda x: toy.fresh(x * 2) + x, HOST)
    for n in (5, 6) * 3:
        pair(make(n))
        pair(rows(n))


def test_static_input_at_one_address_with_other_strides() -> None:
    pair = Pair(lambda x, table: toy.fresh(x * 2) + table, HOST)
    memory = rows(20)
    for step in (1, 2, 1, 3):
        for _ in range(3):
            pair(rows(5), static(memory[::step][:5]))


def test_static_input_that_alternates_between_two_places() -> None:
    pair = Pair(lambda x, table: toy.fresh(x * 2) + table, HOST)
    tables = [static(torch.randn(4)) for _ in range(2)]
    before = counters.captures
    for index in range(20):
        pair(rows(5), tables[index % 2])
    assert counters.captures - before <= 6


def test_static_input_that_never_stays_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(lambda x, table: toy.fresh(x * 2) + table, HOST)
    tables = [static(torch.randn(4)) for _ in range(9)]
    for _ in range(2):
        for table in tables:
            pair(rows(5), table)
    assert sum("static inputs keep changing their addresses" in record.message for record in caplog.records) == 1
