"""Sizes that are new in every call: said once, and not captured any more; what comes back is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_helpers import rows
from runtime_helpers import compile_host, the_owner
from torch import Tensor

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.runtime.program.unreplayed import MOST

toy = torch.ops.toy


def grown(x: Tensor, cache: Tensor) -> Tensor:
    return toy.fresh(x * 2) + cache.sum(0)


def numbered(x: Tensor, length: int) -> Tensor:
    return toy.fresh(x * 2) * length


def scaled(x: Tensor, scale: float) -> Tensor:
    return toy.fresh(x * scale) + 1


CHANGING: list[tuple[Callable[..., Tensor], Callable[[int], Any], str]] = [
    (grown, lambda n: torch.randn(n, 4), "cache.size()[0]"),
    (numbered, lambda n: n, "length"),
    (scaled, lambda n: 0.5 + n, "scale"),
]
CASES = pytest.mark.parametrize(("function", "other", "name"), CHANGING, ids=[case[2] for case in CHANGING])


def serve(compiled: Any, function: Callable[..., Tensor], other: Callable[[int], Any], lengths: Any) -> None:
    """As a generation with a growing cache calls: each length once."""
    with torch.no_grad():
        for n in lengths:
            x, y = rows(3), other(n)
            torch.testing.assert_close(compiled(x, y), function(x, y))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "never replayed" in r.getMessage()]


def once_compiled(function: Callable[..., Tensor], other: Callable[[int], Any], **options: Any) -> Any:
    """Compiled, and past the calls with which Dynamo finds out what changes."""
    compiled = compile_host(function, **options)
    serve(compiled, function, other, (100, 101, 102))
    counters.reset()
    return compiled


@CASES
def test_captures_stop_after_a_handful(
    function: Callable[..., Tensor], other: Callable[[int], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiled, lengths = once_compiled(function, other), range(10, 50)
    serve(compiled, function, other, lengths)
    assert (counters.captures, counters.uncaptured_calls) == (0, len(lengths))  # warm-ups
    assert warnings(caplog) == []
    for _ in range(2):
        serve(compiled, function, other, lengths)
    assert counters.captures == MOST
    (said,) = warnings(caplog)
    assert f"the last {MOST} captures were never replayed: each has another {name}. Calls with new" in said
    # those that were captured come back, and replay
    with counters.expect(captures=0, replays=MOST, uncaptured_calls=len(lengths) - MOST):
        serve(compiled, function, other, lengths)


@CASES
def test_captures_go_on_where_buckets_come_back(
    function: Callable[..., Tensor], other: Callable[[int], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = once_compiled(function, other)
    for start in range(10, 50, 5):
        for _ in range(3):
            serve(compiled, function, other, range(start, start + 5))
    assert counters.captures == 40
    assert warnings(caplog) == []


@CASES
def test_captures_ahead_of_serving_are_asked_for(
    function: Callable[..., Tensor], other: Callable[[int], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiled, lengths = once_compiled(function, other), range(10, 30)
    dsv4_compile.capture(compiled, lambda n: (rows(3), other(n)), lengths, progress=False)
    assert counters.captures == len(lengths)
    assert warnings(caplog) == []
    with counters.expect(captures=0, uncaptured_calls=0):
        serve(compiled, function, other, lengths)
    # also after captures were stopped
    for _ in range(2):
        serve(compiled, function, other, range(30, 60))
    assert len(warnings(caplog)) == 1
    dsv4_compile.capture(compiled, lambda n: (rows(3), other(n)), [90], progress=False)
    with counters.expect(captures=0, replays=1, uncaptured_calls=0):
        serve(compiled, function, other, [90])


@CASES
def test_two_calls_of_each_are_a_warm_up_by_hand(
    function: Callable[..., Tensor], other: Callable[[int], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = once_compiled(function, other)
    for n in range(10, 40):
        serve(compiled, function, other, (n, n))
    assert counters.captures == 30
    assert warnings(caplog) == []
    with counters.expect(captures=0, uncaptured_calls=0, replays=30):
        serve(compiled, function, other, range(10, 40))


def test_listed_sizes_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Tensor) -> Tensor:
        return toy.fresh(x * 2) + 1

    sizes = list(range(10, 30))
    compiled = compile_host(function, capture_sizes=sizes)
    with torch.no_grad():
        for _ in range(2):
            for n in sizes:
                compiled(rows(n))
    assert counters.captures == len(sizes)
    assert warnings(caplog) == []


def test_another_size_beside_the_listed_ones(caplog: pytest.LogCaptureFixture) -> None:
    """The list is of token counts, and says nothing of a cache that grows."""
    compiled = once_compiled(grown, lambda n: torch.randn(n, 4), capture_sizes=[3])
    for _ in range(2):
        serve(compiled, grown, lambda n: torch.randn(n, 4), range(10, 40))
    assert counters.captures == MOST
    (said,) = warnings(caplog)
    assert "another cache.size()[0]." in said


def test_other_sizes_of_what_does_not_keep_changing_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    compiled = once_compiled(grown, lambda n: torch.randn(n, 4))
    for _ in range(2):
        serve(compiled, grown, lambda n: torch.randn(n, 4), range(10, 40))
    known = the_owner()._cache.buckets()
    cache = torch.randn(10, 4)
    with torch.no_grad(), counters.expect(captures=2, uncaptured_calls=2):
        for n in (5, 6):
            for _ in range(3):
                x = rows(n)
                torch.testing.assert_close(compiled(x, cache), grown(x, cache))
    assert len(the_owner()._cache.buckets() - known) == 2
    assert len(warnings(caplog)) == 1


def test_a_reset_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    for times in (1, 2):
        compiled = once_compiled(numbered, lambda n: n)
        for _ in range(2):
            serve(compiled, numbered, lambda n: n, range(10, 30))
        assert counters.captures == MOST
        assert len(warnings(caplog)) == times
        torch._dynamo.reset()
