"""Calls inside of calls and calls from several threads: none touches the workspace of another, and none hangs."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from case_helpers import rows
from hooks import HOOK, expected, hooked, set_hook, toy
from runtime_helpers import call_often, captured_sizes, compile_host, entries, the_owner
from torch import Tensor, fx
from toy_ops import Host

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.compat.dynamo import module_of
from dsv4_compile.runtime import captured
from dsv4_compile.runtime.engines.host.engine import HostEngine


@pytest.fixture(autouse=True)
def plain_hook() -> Iterator[None]:
    """The hook doubles its argument, unless a test lets it do more."""
    before = Host.function
    yield
    Host.function = before


def call(compiled: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return compiled(x)


# calls inside of calls


@pytest.mark.parametrize("inner", [5, 8], ids=["same bucket", "other bucket"])
@pytest.mark.parametrize("at", [0, 1, 2, 3], ids=["warm-up", "capture", "replay", "second replay"])
def test_call_from_inside_of_an_eager_op_runs_uncaptured(at: int, inner: int) -> None:
    compiled = compile_host(hooked, **HOOK)
    results = []

    def nested(q: Tensor) -> Tensor:
        set_hook(lambda q: 2 * q)
        x = rows(inner)
        results.append((call(compiled, x), expected(x)))
        return 2 * q

    for index in range(5):
        x = rows(5)
        if index == at:
            set_hook(nested)
        with counters.expect(uncaptured_calls=(index == 0) + (index == at), captures=int(index == 1)):
            torch.testing.assert_close(call(compiled, x), expected(x))
    ((result, wanted),) = results
    torch.testing.assert_close(result, wanted)
    assert captured_sizes() == [5]


def test_recursion() -> None:
    compiled = compile_host(hooked, **HOOK)
    depth = 0

    def recurse(q: Tensor) -> Tensor:
        nonlocal depth
        if depth == 4:
            return 2 * q
        depth += 1
        x = rows(5 + depth % 2)
        torch.testing.assert_close(call(compiled, x), expected(x))
        depth -= 1
        return 2 * q

    set_hook(recurse)
    for index in range(4):
        with counters.expect(uncaptured_calls=4 + (index == 0), captures=int(index == 1)):
            x = rows(5)
            torch.testing.assert_close(call(compiled, x), expected(x))
    assert captured_sizes() == [5]


def test_recursion_into_the_graph_of_one_token() -> None:
    """It has a workspace of its own, so both calls may be captured."""
    compiled = compile_host(hooked, **HOOK)

    def nested(q: Tensor) -> Tensor:
        if q.shape[0] > 1:
            x = rows(1)
            torch.testing.assert_close(call(compiled, x), expected(x))
        return 2 * q

    set_hook(nested)
    with counters.expect(captures=2, uncaptured_calls=2, replays=2 * 4):
        for _ in range(5):
            x = rows(5)
            torch.testing.assert_close(call(compiled, x), expected(x))


def test_one_compiled_function_calls_another() -> None:
    inner = compile_host(lambda x: toy.fresh(x * 3) + 1)
    outer = compile_host(hooked, **HOOK)
    set_hook(lambda q: call(inner, q) / 3 - 1 / 3)
    with counters.expect(captures=2 * 2, uncaptured_calls=2 * 2):
        for n in (5, 6) * 4:
            x = rows(n)
            torch.testing.assert_close(call(outer, x), expected(x))


def test_nested_call_that_raises_leaves_the_outer_one_usable() -> None:
    compiled = compile_host(hooked, **HOOK)

    def fail(q: Tensor) -> Tensor:
        raise KeyError("inner")

    def nested(q: Tensor) -> Tensor:
        set_hook(fail)
        with pytest.raises(KeyError, match="inner"):
            call(compiled, rows(5))
        set_hook(nested)
        return 2 * q

    set_hook(nested)
    for _ in range(4):
        x = rows(5)
        torch.testing.assert_close(call(compiled, x), expected(x))
    set_hook(lambda q: 2 * q)
    with counters.expect(replays=1, uncaptured_calls=0):
        x = rows(5)
        torch.testing.assert_close(call(compiled, x), expected(x))


def test_capture_ahead_from_inside_of_a_call_leaves_no_trace() -> None:
    """It cannot capture then, but it must not write the caches either."""

    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        return hooked(x)

    compiled, cache = compile_host(f, **HOOK), torch.zeros(4)
    torch._dynamo.mark_static_address(cache)

    def nested(q: Tensor) -> Tensor:
        set_hook(lambda q: 2 * q)
        dsv4_compile.capture(compiled, lambda n: (rows(n), cache), sizes=(6,), progress=False)
        return 2 * q

    for count in range(1, 5):
        set_hook(nested)
        x = rows(5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, cache), expected(x))
        assert cache.tolist() == [count] * 4
    assert len(entries()) == 1


def test_reset_from_inside_of_a_call() -> None:
    compiled = compile_host(hooked, **HOOK)
    call_often(compiled, rows(5))

    def reset(q: Tensor) -> Tensor:
        set_hook(lambda q: 2 * q)
        torch._dynamo.reset()
        return 2 * q

    set_hook(reset)
    for _ in range(4):
        x = rows(5)
        torch.testing.assert_close(call(compiled, x), expected(x))


# calls from several threads


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(index)` in threads that start together; the first exception of one passes on."""
    barrier = threading.Barrier(count)

    def start(index: int) -> None:
        barrier.wait(250)
        work(index)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(start, index) for index in range(count)]:
            future.result(timeout=250)


def test_threads_share_the_buckets_of_one_function() -> None:
    """Whoever finds the workspace in use runs uncaptured, so how many calls are replays is a matter of chance."""
    compiled = compile_host(hooked, **HOOK)
    call(compiled, rows(9))  # Dynamo compiles in one thread

    def work(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for _ in range(25):
            n = int(torch.randint(5, 9, (), generator=generator))
            x = torch.randn(n, 4, generator=generator)
            torch.testing.assert_close(call(compiled, x), expected(x))

    before = counters.snapshot()
    in_threads(4, work)
    after = counters.snapshot()
    calls = {name: after[name] - before[name] for name in ("replays", "uncaptured_calls", "captures", "recaptures")}
    assert calls["replays"] + calls["uncaptured_calls"] == 4 * 25
    assert calls["captures"] <= 4
    assert calls["recaptures"] == 0
    for n in (5, 6, 7, 8) * 2:
        call(compiled, rows(n))
    assert captured_sizes() == [5, 6, 7, 8]


def test_threads_that_meet_a_new_bucket_together_capture_it_once() -> None:
    compiled = compile_host(hooked, **HOOK)
    call(compiled, rows(9))

    def work(index: int) -> None:
        x = rows(5)
        torch.testing.assert_close(call(compiled, x), expected(x))

    with counters.expect(captures=1, recaptures=0):
        in_threads(4, work)
        for _ in range(2):
            work(0)


def test_threads_with_functions_of_their_own() -> None:
    """One captures while the others replay; none is in the way of another."""
    functions = [lambda x: hooked(x) * 2, lambda x: hooked(x) - 1, lambda x: hooked(x).sin()]
    compiled = [compile_host(function, **HOOK) for function in functions]
    for function in compiled:
        call(function, rows(9))

    def work(index: int) -> None:
        for n in range(5, 13):
            for _ in range(4):
                x = rows(n)
                torch.testing.assert_close(call(compiled[index], x), functions[index](x))

    with counters.expect(captures=3 * 8, recaptures=0, uncaptured_calls=3 * 7, replays=3 * (8 * 3 + 1)):
        in_threads(3, work)


def test_the_python_of_a_graph_is_written_once_however_many_threads_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once would write into each other's names, and run what comes of it."""
    writers: list[int] = []
    together = threading.Event()
    write = fx.Graph.python_code

    def watched(self: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        writers.append(threading.get_ident())
        if len(writers) > 1:
            together.set()
        together.wait(timeout=0.5)  # for the other one to come, were it let in
        return write(self, *args, **kwargs)

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.mul, (x, 2)))
    module = module_of(torch.nn.Module(), graph)
    monkeypatch.setattr(fx.Graph, "python_code", watched)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(module.forward, [1, 2])) == [2, 4]
    assert len(writers) == 1


def test_active_call_is_not_disturbed_by_another_thread() -> None:
    """While one call sits in its eager op, another thread asks for the same bucket and for a new one."""
    compiled = compile_host(hooked, **HOOK)
    call_often(compiled, rows(5))
    others = []

    def other() -> None:
        for n in (5, 6, 6, 5):
            x = rows(n)
            others.append((call(compiled, x), expected(x)))

    thread = threading.Thread(target=other)

    def wait(q: Tensor) -> Tensor:
        set_hook(lambda q: 2 * q)
        thread.start()
        thread.join(60)  # it finds the workspace in use, and does without
        return 2 * q

    set_hook(wait)
    x = rows(5)
    with counters.expect(replays=1, uncaptured_calls=4, captures=0):
        torch.testing.assert_close(call(compiled, x), expected(x))
    assert len(others) == 4
    for result, wanted in others:
        torch.testing.assert_close(result, wanted)


def test_exception_in_a_thread_does_not_keep_others_out() -> None:
    compiled = compile_host(hooked, **HOOK)
    call_often(compiled, rows(5))

    def fail(q: Tensor) -> Tensor:
        raise KeyError("on purpose")

    def work(index: int) -> None:
        with pytest.raises(KeyError, match="on purpose"):
            call(compiled, rows(5))

    set_hook(fail)
    in_threads(3, work)
    set_hook(lambda q: 2 * q)
    x = rows(5)
    torch.testing.assert_close(call(compiled, x), expected(x))


def test_thread_that_ends_leaves_its_captures_to_others() -> None:
    compiled = compile_host(hooked, **HOOK)
    in_threads(1, lambda index: call_often(compiled, rows(5)))
    with counters.expect(captures=0, replays=1):
        x = rows(5)
        torch.testing.assert_close(call(compiled, x), expected(x))


def test_captures_that_are_dropped_while_other_threads_call() -> None:
    compiled = compile_host(hooked, **HOOK)
    call(compiled, rows(9))
    owner = the_owner()

    def work(index: int) -> None:
        for count in range(60):
            if index == 0:
                owner.release()
            x = rows(5 + count % 3)
            torch.testing.assert_close(call(compiled, x), expected(x))

    in_threads(3, work)


def test_grad_mode_of_one_thread_is_no_matter_of_another() -> None:
    compiled = compile_host(hooked, **HOOK)
    call(compiled, rows(9))
    seen = []

    def work(index: int) -> None:
        for _ in range(5):
            call(compiled, rows(5 + index))
        seen.append(torch.is_grad_enabled())

    in_threads(2, work)
    assert seen == [True, True]


@pytest.mark.parametrize("replays_in_captures", [True, False], ids=["as the host engine", "as the cuda engine"])
def test_a_call_in_a_thread_that_records_another_graph(
    replays_in_captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA launches no graph into a capture: there the call runs uncaptured, and becomes part of that graph."""
    monkeypatch.setattr(HostEngine, "replays_in_captures", replays_in_captures)
    compiled = compile_host(hooked, **HOOK)
    call_often(compiled, rows(5))
    x, uncaptured = rows(5), int(not replays_in_captures)
    with monkeypatch.context() as context:
        context.setattr(captured, "is_capturing", lambda: True)
        with counters.expect(uncaptured_calls=uncaptured, replays=1 - uncaptured, captures=0):
            torch.testing.assert_close(call(compiled, x), expected(x))
    with counters.expect(replays=1, uncaptured_calls=0):
        torch.testing.assert_close(call(compiled, x), expected(x))
