"""The captured callable: what is warmed up, captured, replayed and captured again, and what a capture is valid for."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from case_helpers import Pair, rows
from runtime_helpers import HOST, call_often, captured_sizes, compile_host, entries
from torch import Tensor
from toy_ops import LOG
from weighted_model import Model

from dsv4_compile import counters

toy = torch.ops.toy


def layer(x: Tensor) -> Tensor:
    return toy.fresh(x.sin()) * 3 + x


# calls of a bucket


def test_first_call_warms_up_second_captures_later_ones_replay() -> None:
    pair = Pair(layer, HOST)
    for change in (
        {"graphs_compiled": 1, "pieces_compiled": 2, "uncaptured_calls": 1, "captures": 0, "replays": 0},
        {"graphs_compiled": 0, "pieces_compiled": 0, "uncaptured_calls": 0, "captures": 1, "replays": 1},
        {"uncaptured_calls": 0, "captures": 0, "replays": 1},
        {"uncaptured_calls": 0, "captures": 0, "replays": 1},
    ):
        with counters.expect(recaptures=0, eager_op_calls=1, **change):
            pair(rows(5))
    with counters.expect(graphs_compiled=0, uncaptured_calls=1, captures=1, replays=2):
        for _ in range(3):
            pair(rows(6))


def test_program_is_one_straight_line_of_replays_and_eager_ops() -> None:
    def two(x: Tensor) -> Tensor:
        return toy.fresh(layer(x).exp()) - 1

    call_often(compile_host(two), rows(5))
    (entry,) = entries()
    lines = [line.strip() for line in entry.program.source.splitlines()[2:]]
    assert [line.rpartition("  # ")[2] for line in lines if "replay()" in line] == ["piece_0", "piece_1", "piece_2"]
    assert not any(line.startswith(("for ", "if ", "with ", "while ")) for line in lines)
    # stage x; three replays; two regions of a title, an op, a copy for the next piece and a del; clone; return
    assert len(lines) == 1 + 3 + 2 * 4 + 2


def test_effects_happen_once_in_each_kind_of_call() -> None:
    LOG.clear()
    seen = []

    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x.sum())
        h = x + torch.rand(4)
        toy.tick(cache)
        return toy.fresh(h)

    pair = Pair(f, HOST)
    cache = torch.zeros(3)
    for n in (5, 5, 5, 5):
        pair(rows(n), cache)
        seen.append(float(cache.sum()))
    assert [value for value in seen for _ in range(2)] == LOG  # the eager model and the call


# what a bucket is


def test_key_is_every_size_not_only_the_tokens() -> None:
    pair = Pair(lambda x, y: toy.fresh(x * 2).sum(0) + y.sum(0), HOST)
    sizes = [(5, 6), (5, 7), (6, 5), (8, 6)]
    with counters.expect(graphs_compiled=1, captures=4, uncaptured_calls=4, replays=12):
        for n, m in sizes * 2 + sizes[::-1] * 2:
            pair(rows(n), rows(m))


def test_hidden_size_is_part_of_the_key() -> None:
    pair = Pair(lambda x, w: toy.fresh(x @ w) + 1, HOST)
    with counters.expect(captures=4, uncaptured_calls=4):
        for _ in range(3):
            for n, hidden in ((5, 4), (6, 4), (5, 7), (6, 7)):
                pair(rows(n, hidden), rows(hidden, 3))


def test_int_argument_is_part_of_the_key() -> None:
    pair = Pair(lambda x, start: toy.fresh(x * start)[1:] + start, HOST)
    for start in (2, 3):  # Dynamo takes the first for a constant, and 3 is the first of a graph for all others
        pair(rows(5), start)
    with counters.expect(captures=3, uncaptured_calls=1, replays=11):
        for start in (2, 3, 7) * 2:
            pair(rows(5), start)
            pair(rows(5), start)


def test_float_argument_is_part_of_the_key() -> None:
    pair = Pair(lambda x, scale: toy.fresh(x * scale) + scale, HOST)
    scales = (0.5, -0.5, 2.5, math.pi, 1e-30, math.inf, -math.inf)
    with counters.expect(graphs_compiled=1, captures=7, uncaptured_calls=7, replays=14):
        for scale in scales * 3:
            pair(rows(5), scale)


def test_nan_is_one_bucket() -> None:
    compiled = compile_host(lambda x, scale: (toy.fresh(x * 2), x * scale))
    x = rows(5)
    call_often(compiled, x, 0.5)
    with counters.expect(captures=1, uncaptured_calls=1, replays=3):
        for _ in range(4):
            doubled, scaled = compiled(x, math.nan)
            assert torch.equal(doubled, 4 * x)
            assert scaled.isnan().all()


def test_zero_has_a_sign() -> None:
    pair = Pair(lambda x, scale: toy.fresh(x.abs() + 1) / scale, HOST)
    for scale in (2.0, 3.0, 0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 0.0):
        pair(rows(5), scale)


def test_one_token_and_none_have_graphs_of_their_own() -> None:
    pair = Pair(layer, HOST)
    with counters.expect(captures=2, uncaptured_calls=2 + 3):  # a call without tokens has nothing to capture
        for n in (1, 5, 0) * 3:
            pair(rows(n))


@pytest.mark.parametrize("make", [lambda n: rows(n, 9)[:, 2:6], lambda n: rows(4, n).t(), lambda n: rows(2 * n)[::2]])
def test_strides_of_an_input_do_not_matter(make: Callable[[int], Tensor]) -> None:
    pair = Pair(layer, HOST)
    for n in (5, 6) * 4:
        pair(make(n))
        pair(rows(n))


def test_input_with_an_offset_into_larger_memory() -> None:
    pair = Pair(layer, HOST)
    large = rows(64)
    for start in range(12):
        pair(large[start : start + 5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_another_dtype_is_another_graph(dtype: torch.dtype) -> None:
    pair = Pair(layer, HOST)
    for _ in range(3):
        pair(rows(5))
        pair(rows(5).to(dtype))


def test_autocast_around_the_call_is_another_graph() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return toy.fresh(x @ w) @ w

    compiled, w = compile_host(f), torch.randn(4, 4)
    with torch.no_grad(), counters.expect(captures=2, recaptures=0):
        for enabled in (False, True) * 4:
            x = rows(5)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                result, wanted = compiled(x, w), f(x, w)
            assert result.dtype == (torch.bfloat16 if enabled else torch.float32)
            assert torch.equal(result, wanted)
            w.mul_(1.5)  # no cast of old values is kept


def test_each_part_of_a_broken_graph_is_captured() -> None:
    def f(x: Tensor) -> Tensor:
        h = toy.fresh(x * 2)
        torch._dynamo.graph_break()
        return toy.fresh(h + 1) * 2

    pair = Pair(f, HOST)
    with counters.expect(graphs_compiled=2, captures=2 * 2, uncaptured_calls=2 * 2, replays=2 * 6):
        for n in (5, 6) * 4:
            pair(rows(n))


# limits


def test_buckets_beyond_max_captures_run_uncaptured_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(layer, HOST, max_captures=2)
    with counters.expect(captures=2, recaptures=0, uncaptured_calls=2 + 2 * 6, replays=2 * 5):
        for n in (5, 6, 7, 8) * 6:
            pair(rows(n))
    warnings = [record.getMessage() for record in caplog.records if "max_captures" in record.getMessage()]
    assert warnings == ["max_captures=2 buckets are captured; new ones run uncaptured from now on"]


def test_a_bucket_that_is_captured_may_move_where_max_captures_is_reached() -> None:
    """It takes its own place, and no new one."""
    pair = Pair(lambda x, y: toy.fresh(x * 2) + y, HOST, max_captures=1)
    for moves in range(3):
        y = torch.randn(5, 4)
        torch._dynamo.mark_static_address(y)
        with counters.expect(captures=1, recaptures=min(moves, 1), uncaptured_calls=int(moves == 0)):
            for _ in range(3):
                pair(rows(5), y)


def test_max_captures_counts_each_set_of_weights_by_itself() -> None:
    pairs = [Pair(Model(), HOST, max_captures=2) for _ in range(2)]
    with counters.expect(captures=2 * 2):
        for n in (5, 6) * 3:
            for pair in pairs:
                pair(rows(n))


def test_moved_weights_make_room_for_new_buckets() -> None:
    model = Model()
    pair = Pair(model, HOST, max_captures=2)
    for n in (5, 6, 7) * 3:
        pair(rows(n))
    model.w.data = torch.randn(4, 4)
    with counters.expect(captures=2, uncaptured_calls=0, replays=6):
        for n in (7, 6) * 3:
            pair(rows(n))


def test_only_listed_sizes_are_captured() -> None:
    pair = Pair(layer, HOST, capture_sizes=[16, 8, 8])
    with counters.expect(captures=2, uncaptured_calls=2 + 3 * 3):
        for n in (8, 16, 9, 15, 17) * 3:
            pair(rows(n))
    assert captured_sizes() == [8, 16]
