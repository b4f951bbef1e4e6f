"""Arenas: one and locked where the largest bucket is known, generations otherwise; they never move and leak nowhere."""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Callable

import pytest
import torch
from case_helpers import Pair, rows
from runtime_helpers import HOST, Allocations, call_often, captured_sizes, compile_host
from runtime_helpers import allocations as allocations  # a fixture
from torch import Tensor, nn

from dsv4_compile import counters

toy = torch.ops.toy


def two_layers(x: Tensor) -> Tensor:
    a, b = x.sin(), x.cos()
    h = toy.fresh(a) + b
    return toy.fresh(h.exp()) + h - a


def tokens(n: int, width: int = 4) -> Tensor:
    """Rows of a fixed width, as after a weight; else the width is a size of its own, without a bound."""
    x = rows(n, width)
    torch._dynamo.mark_static(x, 1)
    return x


def bounded(n: int) -> Tensor:
    x = tokens(n)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=32)
    return x


# a known bound


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"max_tokens": 32}, tokens),
        ({"capture_sizes": [8, 16, 32]}, tokens),
        ({}, bounded),
    ],
    ids=["max_tokens", "capture_sizes", "mark_dynamic"],
)
def test_known_bound_makes_one_arena_for_the_largest_bucket(
    allocations: Allocations, options: dict[str, object], make: Callable[[int], Tensor]
) -> None:
    pair = Pair(two_layers, HOST, dynamic=bool(options) or None, **options)
    for n in (8, 8, 16, 16, 32, 32, 8, 16, 32):
        pair(make(n))
    # [32, 4] floats are 512 bytes; the piece in the middle takes fresh, a and b and gives h and exp
    assert allocations.sizes == allocations.alive == [5 * 512]
    assert captured_sizes() == [8, 16, 32]


@pytest.mark.parametrize("options", [{"max_tokens": 32}, {"capture_sizes": [8, 32]}], ids=["max_tokens", "sizes"])
def test_larger_call_runs_uncaptured_and_moves_nothing(allocations: Allocations, options: dict[str, object]) -> None:
    pair = Pair(two_layers, HOST, **options)
    for n in (8, 8):
        pair(tokens(n))
    with counters.expect(captures=0, uncaptured_calls=4, replays=4):
        for n in (500, 8, 33, 8, 500, 8, 500, 8):
            pair(tokens(n))
    assert len(allocations.made) == 1


def test_larger_call_before_any_capture_does_not_size_the_arena(allocations: Allocations) -> None:
    pair = Pair(two_layers, HOST, max_tokens=32)
    for n in (500, 500, 500, 8, 8, 8):
        pair(tokens(n))
    assert allocations.sizes == [5 * 512]


def test_size_that_is_not_listed_is_never_captured() -> None:
    pair = Pair(two_layers, HOST, capture_sizes=[8, 32])
    with counters.expect(captures=1, uncaptured_calls=1 + 4, replays=3):
        for n in (8, 8, 16, 16, 16, 16, 8, 8):
            pair(rows(n))
    assert captured_sizes() == [8]


@pytest.mark.parametrize("first", [4, 5])
def test_bound_holds_where_the_token_count_is_an_expression(allocations: Allocations, first: int) -> None:
    pair = Pair(lambda x: toy.fresh((x * 2).view(-1, 2)) + 1, HOST, max_tokens=64)  # 2 * n tokens
    for n in (first, first, 16, 16, 32, 32, first):
        pair(tokens(n))
    assert len(allocations.made) == 1


def test_bound_holds_where_the_token_count_is_a_part_of_the_rows(allocations: Allocations) -> None:
    def f(x: Tensor) -> Tensor:
        return toy.fresh(x[: x.shape[0] // 3] * 2) + 1

    pair = Pair(f, HOST, max_tokens=10)
    with counters.expect(captures=3, uncaptured_calls=3 + 1):  # 33 rows are 11 tokens
        for n in (6, 6, 33, 32, 32, 31, 31):
            pair(tokens(n))
    assert len(allocations.made) == 1


def test_bound_on_tokens_is_no_bound_on_other_sizes() -> None:
    pair = Pair(two_layers, HOST, max_tokens=16)
    for width in (4, 6, 40):
        with counters.expect(captures=1, replays=2):
            for _ in range(3):
                pair(rows(16, width))


def test_every_bucket_below_the_bound_is_captured(allocations: Allocations) -> None:
    """Placement is not monotone: 13 tokens placed by themselves need 3,840 bytes, 16 tokens 3,584."""
    pair = Pair(uneven, HOST, max_tokens=16)
    weight = nn.Parameter(rows(16, 16), requires_grad=False)
    with counters.expect(captures=15, uncaptured_calls=15, recaptures=0):
        for n in range(2, 17):
            pair(tokens(n, 16), weight)
            pair(tokens(n, 16), weight)
    assert len(allocations.made) == 1


def uneven(x: Tensor, w: Tensor) -> Tensor:
    toy.tick(x)  # the first split op says how many tokens there are
    total = x.sum()
    c = torch.cat([x, w])
    total = toy.fresh(total) + c.sum()
    total = toy.fresh(total)
    b = w * 2
    total = toy.fresh(total) + b.sum()
    a = x * 2
    return toy.fresh(total) + a.sum()


# no bound


def test_generations_cost_about_twice_the_largest_bucket(allocations: Allocations) -> None:
    sizes = (1, 2, 4, *range(8, 513, 8))  # what a serving engine captures
    assert len(sizes) == 67
    compiled = compile_host(lambda x: toy.fresh(x * 2) + 1, max_captures=100)
    with counters.expect(captures=67, uncaptured_calls=67, recaptures=0):
        for n in sizes:
            call_often(compiled, rows(n, 63), times=2)
    largest = 2 * 512 * 63 * 4  # the op's argument and its result
    assert sum(allocations.alive) <= 2.05 * largest
    assert allocations.sizes == allocations.alive  # the older buckets still use theirs
    x = rows(sizes[1], 63)
    with counters.expect(replays=1, captures=0):
        assert torch.equal(call_often(compiled, x, times=1), 2 * (x * 2) + 1)


def test_older_buckets_stay_right_after_growth(allocations: Allocations) -> None:
    allocations.holds = True
    pair = Pair(two_layers, HOST)
    for n in (16, 16, 64, 64, 256, 256, 1024, 1024):
        pair(rows(n))
    addresses = [memory.data_ptr() for memory in allocations.memories]
    assert len(set(addresses)) == 4
    with counters.expect(captures=0, replays=12):
        for n in (16, 1024, 256, 16, 64, 1024) * 2:
            allocations.poison()  # no value outlives a call, in whichever arena
            pair(rows(n))
    assert len(allocations.made) == 4


def test_arena_of_dropped_programs_is_freed(allocations: Allocations) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return toy.fresh(x * self.w) + 1

    scale = Scale()
    compiled = compile_host(scale)
    for n in (5, 64, 1024):
        call_often(compiled, rows(n))
    assert len(allocations.alive) == 3
    scale.w.data = 2 * torch.ones(4)
    call_often(compiled, rows(5))  # all three programs bound the old weights

    gc.collect()
    assert allocations.alive == allocations.sizes[-1:]


def test_random_order_of_many_buckets() -> None:
    rng = random.Random(0)
    pair = Pair(two_layers, HOST)
    for _ in range(120):
        pair(rows(rng.choice((2, 3, 5, 8, 13, 21, 34, 55))))
    assert len(captured_sizes()) == 8


# whose memory it is


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.cache[: x.shape[0]].add_(h)
        return toy.fresh(h) + self.cache[: x.shape[0]]


def test_arena_is_no_part_of_the_model() -> None:
    model = Model()
    compiled = compile_host(model)
    call_often(compiled, rows(8))
    names = {"linear.weight", "linear.bias", "cache"}
    assert set(model.state_dict()) == names == {name.removeprefix("_orig_mod.") for name in compiled.state_dict()}
    assert set(dict(model.named_parameters()) | dict(model.named_buffers())) == names
    eager = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    assert stream.tell() < 5000  # the weights and the cache, with their names
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), eager.state_dict().values(), strict=True))


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_memory_of_the_runtime_is_written_in_every_mode(first: type, allocations: Allocations) -> None:
    """What inference mode makes could not be written outside of it."""
    allocations.holds = True
    modes = [first, torch.inference_mode, torch.no_grad, first, torch.no_grad, torch.inference_mode]
    model = Model().requires_grad_(False)
    compiled, eager = compile_host(model), copy.deepcopy(model)
    for mode in modes * 3:
        for n in (8, 16):
            with mode():
                x = rows(n)
                assert torch.equal(compiled(x), eager(x))
                assert torch.equal(model.cache, eager.cache)
    assert allocations.memories
    assert not any(memory.is_inference() for memory in allocations.memories)


def test_static_outputs_are_written_in_every_mode() -> None:
    compiled = compile_host(lambda x: toy.fresh(x * 2) + 1, static_outputs=True)
    x = rows(8)
    for mode in (torch.inference_mode, torch.no_grad) * 3:
        with mode():
            for _ in range(3):
                assert torch.equal(compiled(x), 4 * x + 1)
