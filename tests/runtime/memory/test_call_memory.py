"""Several compiled models in one `MemoryPool`: less memory, right results, one call at a time."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from case_helpers import rows
from hooks import HOOK, expected, hooked, set_hook, toy
from runtime_helpers import (
    Allocations,
    call_often,
    captured_sizes,
    compile_host,
    owners,
    the_owner,
)
from runtime_helpers import allocations as allocations  # a fixture
from torch import Tensor
from toy_ops import Host

import dsv4_compile
from dsv4_compile import MemoryPool, counters
from dsv4_compile.errors import OptionError


def deep(x: Tensor) -> Tensor:
    """Temporaries inside of its pieces, and values that cross."""
    y = (x * 3).sin() + x.cos()
    z = toy.fresh(y * 2)
    return (z + y).tanh() * 2 - x


def wide(x: Tensor) -> Tensor:
    """Another workspace, a larger one."""
    return toy.fresh(torch.cat([x, x * 2], dim=1)).exp()[:, : x.shape[1]] + x


@pytest.fixture(autouse=True)
def plain_hook() -> Any:
    before = Host.function
    yield
    Host.function = before


def call(compiled: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return compiled(x)


def serve_alternately(functions: Any, compiled: Any) -> None:
    for n in (5, 8, 5, 3, 8, 5, 3, 8) * 2:
        for function, one in zip(functions, compiled, strict=True):
            x = rows(n)
            torch.testing.assert_close(call(one, x), function(x))


@pytest.mark.parametrize("bound", [None, 8])
def test_two_models_serve_alternately_out_of_one_workspace(bound: int | None) -> None:
    pool = MemoryPool()
    compiled = [compile_host(function, pool=pool, max_tokens=bound) for function in (wide, deep)]
    with counters.expect(captures=6, recaptures=0, uncaptured_calls=6, replays=2 * 16 - 6):
        serve_alternately((wide, deep), compiled)
    first, second = owners()[-2:]
    assert first._memory.arenas is second._memory.arenas
    assert first._memory.arenas._last is not None


def test_the_workspace_is_that_of_the_largest(allocations: Allocations) -> None:
    x = rows(8)
    torch._dynamo.mark_static(x, 1)
    for order, sizes in (((deep, wide), [1024]), ((wide, deep), [768, 1024])):
        pool = MemoryPool()
        allocations.made.clear()
        for function in order:
            call_often(compile_host(function, max_tokens=8, pool=pool), x)
        assert allocations.sizes == sizes


def test_temporaries_are_shared() -> None:
    call_often(compile_host(deep), rows(64))
    alone = the_owner()._pool.nbytes
    pool = MemoryPool()
    for _ in range(3):
        call_often(compile_host(lambda x: deep(x), pool=pool), rows(64))
    assert the_owner()._pool.nbytes == alone > 0


def test_a_call_inside_of_another_models_call_runs_uncaptured() -> None:
    pool = MemoryPool()
    inner, outer = compile_host(deep, pool=pool), compile_host(hooked, pool=pool, **HOOK)
    call_often(inner, rows(5))
    call_often(outer, rows(5))
    results = []

    def nested(q: Tensor) -> Tensor:
        x = rows(5)
        results.append((call(inner, x), deep(x)))
        return 2 * q

    set_hook(nested)
    x = rows(5)
    with counters.expect(uncaptured_calls=1, replays=1):
        torch.testing.assert_close(call(outer, x), expected(x))
    torch.testing.assert_close(*results[0])
    with counters.expect(uncaptured_calls=0, replays=1):
        call(inner, rows(5))


def test_a_call_in_another_thread_runs_uncaptured() -> None:
    pool = MemoryPool()
    other, waiting = compile_host(deep, pool=pool), compile_host(hooked, pool=pool, **HOOK)
    call_often(other, rows(5))
    call_often(waiting, rows(5))
    began, done = threading.Event(), threading.Event()

    def wait(q: Tensor) -> Tensor:
        began.set()
        assert done.wait(60)
        return 2 * q

    set_hook(wait)
    x, results = rows(5), []
    thread = threading.Thread(target=lambda: results.append(call(waiting, x)))
    thread.start()
    assert began.wait(60)
    y = rows(5)
    with counters.expect(uncaptured_calls=1, replays=0):
        torch.testing.assert_close(call(other, y), deep(y))
    done.set()
    thread.join(60)
    torch.testing.assert_close(results[0], expected(x))


def test_reset_frees_it_and_the_models_share_again(allocations: Allocations) -> None:
    pool = MemoryPool()
    compiled = [compile_host(function, pool=pool) for function in (wide, deep)]
    serve_alternately((wide, deep), compiled)
    assert all(size > 0 for size in allocations.alive)
    torch._dynamo.reset()
    gc.collect()
    assert allocations.alive == []
    serve_alternately((wide, deep), compiled)
    first, second = owners()[-2:]
    assert first._memory.arenas is second._memory.arenas


def test_captured_ahead_together() -> None:
    """One warm-up for both: what `capture` is given calls them one after the other."""
    pool = MemoryPool()
    first, second = (compile_host(function, pool=pool) for function in (wide, deep))
    with counters.expect(captures=4, uncaptured_calls=4):
        dsv4_compile.capture(lambda x: second(first(x)), lambda n: (rows(n),), (5, 8), progress=False)
    assert captured_sizes() == [5, 8]
    with counters.expect(captures=0, uncaptured_calls=0, replays=2):
        x = rows(8)
        torch.testing.assert_close(call(second, call(first, x)), deep(wide(x)))


@pytest.mark.parametrize("value", [MemoryPool, 3, "Shared", None])
def test_what_is_no_pool_is_refused(value: object) -> None:
    match = "option pool=.* is not valid.* Valid: shared, bucket or a dsv4_compile.MemoryPool"
    with torch.no_grad(), pytest.raises(OptionError, match=match):
        compile_host(deep, pool=value)(rows(3))
