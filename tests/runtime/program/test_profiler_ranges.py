"""What a torch profiler sees of a call, and that nothing else changes because it looks."""

from __future__ import annotations

import importlib
import json
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case_helpers import assert_same, rows
from repository import EXAMPLES
from runtime_helpers import LIBRARY, call_often, compile_host, entries, the_owner
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function
from toy_ops import Host

import dsv4_compile
from dsv4_compile import counters

toy, probe = torch.ops.toy, torch.ops.probe
HOOK = {"split_ops": ("toy::hook", "toy::fresh")}


def _marked(q: Tensor) -> Tensor:
    with record_function("marked by the op"):
        return 3 * q


LIBRARY.define("marked(Tensor q) -> Tensor")
LIBRARY.impl("marked", _marked, "CompositeExplicitAutograd")
torch.library.register_fake("probe::marked", torch.empty_like, lib=LIBRARY)


@pytest.fixture(autouse=True)
def surroundings() -> Iterator[None]:
    """No grad; the hook doubles its argument, unless a test lets it do more."""
    before = Host.function
    with torch.no_grad():
        yield
    Host.function = before


def set_hook(function: Callable[[Tensor], Tensor]) -> None:
    Host.function = staticmethod(function)


@dataclass(frozen=True)
class Span:
    """A range of a trace, in microseconds; equal to what has its name and place in the tree."""

    name: str
    thread: int
    start: float
    end: float
    inner: tuple[Span, ...]

    def tree(self) -> Any:
        return (self.name, [span.tree() for span in self.inner]) if self.inner else self.name


def spans_in(path: Path) -> list[Span]:
    """The outermost annotations of a Chrome trace by time, each with those inside of it.

    Ranges of a thread that overlap without one holding the other are an error.
    """
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    ranges = [(event["name"], event["tid"], event["ts"], event["ts"] + event["dur"]) for event in events]
    return _nested(sorted(ranges, key=lambda r: (r[2], -r[3])))


def _nested(ranges: list[tuple[str, int, float, float]]) -> list[Span]:
    spans = []
    while ranges:
        name, thread, start, end = ranges.pop(0)
        inner = [r for r in ranges if r[1] == thread and r[2] < end]
        # times are rounded to nanoseconds, and what is open when the profiler stops ends there
        assert all(r[3] <= end + 0.01 for r in inner), f"{inner} begin inside of {name} and end after it"
        ranges = [r for r in ranges if r not in inner]
        spans.append(Span(name, thread, start, end, tuple(_nested(inner))))
    return spans


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., list[Any]]:
    """Calls a function under a profiler; the names of its spans, nested as they are."""

    def run(function: Callable[[], Any]) -> list[Any]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            function()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        return [span.tree() for span in spans_in(tmp_path / "trace.json")]

    return run


def two(x: Tensor) -> Tensor:
    return toy.fresh(toy.fresh(x.sin() + 1).exp()) - 1


UNITS = ["piece_0", "region_0", "piece_1", "region_1", "piece_2"]
Trace = Callable[..., list[Any]]


def test_each_kind_of_call_has_a_span_with_the_units_of_the_plan(trace: Trace) -> None:
    assert [
        unit.name for unit in dsv4_compile.explain(two, rows(5), options={"split_ops": ["toy::fresh"]}).units
    ] == UNITS
    compiled = compile_host(two, max_captures=1)
    compiled(rows(7))
    title = the_owner()._title
    call_often(compiled, rows(6))
    assert trace(lambda: compiled(rows(5))) == [(f"{title}, warm-up", UNITS)]
    assert trace(lambda: compiled(rows(5))) == [(f"{title}, uncaptured", UNITS)]
    assert trace(lambda: compiled(rows(7))) == [(f"{title}, uncaptured", UNITS)]
    torch._dynamo.reset()
    uncaptured = compile_host(two, engine="off")
    uncaptured(rows(5))
    assert trace(lambda: uncaptured(rows(5))) == UNITS
    torch._dynamo.reset()
    compiled = compile_host(two)
    compiled(rows(5))
    title = f"{the_owner()._title}, bucket (5, 4)"
    assert trace(lambda: compiled(rows(5))) == [(f"{title}, capture", UNITS)]
    for _ in range(2):
        assert trace(lambda: compiled(rows(5))) == [(title, UNITS)]


def test_the_function_with_ranges_is_made_when_a_profiler_first_looks(trace: Trace) -> None:
    compiled = compile_host(two)
    call_often(compiled, rows(5), times=4)
    (entry,) = entries()
    made = entry.program.with_ranges
    assert made.cache_info().currsize == 0
    assert "span" not in entry.program.source
    trace(lambda: compiled(rows(5)))
    trace(lambda: compiled(rows(5)))
    assert made.cache_info().misses == 1
    asked = made.cache_info().hits
    call_often(compiled, rows(5))
    assert made.cache_info().hits == asked == 1


def effects(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = x.sin(), x.cos()
    out = torch.empty_like(a)
    toy.hook(a + b, out)
    cache.add_(x.sum())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = toy.fresh(out * a + torch.rand(4)) @ b.t()
    return z, cache, x


def outcomes(options: dict[str, Any], profiled: bool) -> Any:
    """Everything that six calls do: results, caches, draws, counts; the cache moved often enough to be copied in."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = compile_host(effects, **HOOK, **options)
    seen, held = [], []
    for _ in range(12):
        x, cache = rows(5), torch.zeros(3)
        held.append((cache, torch.empty(len(held) + 17)))
        before = counters.snapshot()
        with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext():
            result = compiled(x, cache)
        change = {name: value - before[name] for name, value in counters.snapshot().items()}
        assert result[1] is cache
        seen.append((result, cache, torch.get_rng_state(), change))
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"check": "full"}, {"static_outputs": True}, {"runner": "mrv1", "region": "minimal"}, {"engine": "off"}],
    ids=str,
)
def test_results_effects_and_counts_are_the_same(options: dict[str, Any]) -> None:
    assert_same(outcomes(options, profiled=True), outcomes(options, profiled=False))


@pytest.mark.parametrize("at", [1, 2, 3], ids=["warm-up", "capture", "replay"])
def test_an_error_is_the_same_and_the_next_call_is_whole(at: int, trace: Trace) -> None:
    def fail(q: Tensor) -> Tensor:
        raise ValueError("no such block")

    def failed_call(profiled: bool) -> list[str]:
        torch._dynamo.reset()
        set_hook(lambda q: 2 * q)
        compiled = compile_host(effects, **HOOK)
        cache = torch.zeros(3)
        call = partial(compiled, rows(5), cache)
        for _ in range(at - 1):
            call()
        set_hook(fail)
        with pytest.raises(ValueError, match="no such block") as caught:
            trace(call) if profiled else call()
        set_hook(lambda q: 2 * q)
        for _ in range(3):
            call()
        lines = [line.line or "" for line in traceback.extract_tb(caught.value.__traceback__)]
        return [line for line in lines if "hook" in line]

    assert failed_call(profiled=True) == failed_call(profiled=False)


def test_inputs_that_are_written_back_are_so_after_an_error(trace: Trace) -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        out = torch.empty_like(x)
        toy.hook(x * 2, out)
        return out

    compiled = compile_host(f, **HOOK)
    caches = [torch.zeros(3) for _ in range(12)]
    for cache in caches:
        compiled(rows(5), cache)
    assert "finally:" in entries()[-1].program.source
    cache = torch.zeros(3)
    set_hook(lambda q: q[99])
    with pytest.raises(IndexError):
        trace(lambda: compiled(rows(5), cache))
    assert cache.tolist() == [1.0, 1.0, 1.0]
    set_hook(lambda q: 2 * q)
    ((_, units),) = trace(lambda: compiled(rows(5), torch.zeros(3)))
    assert units == ["piece_0", "region_0"]


def hooked(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    toy.hook(x.sin(), out)
    return out + 1


@pytest.mark.parametrize("starts", [True, False], ids=["starts", "stops"])
def test_a_profiler_that_starts_or_stops_inside_of_a_call(starts: bool, tmp_path: Path) -> None:
    compiled = compile_host(hooked, **HOOK)
    x = rows(5)
    expected = call_often(compiled, x)
    profiler = profile(activities=[ProfilerActivity.CPU])

    def switch(q: Tensor) -> Tensor:
        (profiler.start if starts else profiler.stop)()
        return 2 * q

    if not starts:
        profiler.start()
    set_hook(switch)
    assert torch.equal(compiled(x), expected)
    set_hook(lambda q: 2 * q)
    assert torch.equal(compiled(x), expected)
    if starts:
        profiler.stop()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    (whole,) = [span.tree() for span in spans_in(tmp_path / "trace.json") if "bucket" in span.name]
    # the call that is under way when it starts has no span; what is open when it stops ends there
    units = ["piece_0", "region_0", "piece_1"] if starts else ["piece_0", "region_0"]
    assert whole == (f"{the_owner()._title}, bucket (5, 4)", units)


def test_threads_of_one_callable_under_a_profiler_of_all_threads(tmp_path: Path) -> None:
    """They call nothing while it starts and stops: torch crashes now and then if any thread runs any op meanwhile."""
    compiled = compile_host(hooked, **HOOK)
    x = rows(5)
    expected = call_often(compiled, x)
    together = threading.Barrier(3)

    @torch.no_grad()
    def serve() -> list[bool]:
        together.wait()
        return [torch.equal(compiled(x), expected) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for index in range(3):
            config = _ExperimentalConfig(profile_all_threads=True)
            with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
                others = [pool.submit(serve) for _ in range(2)]
                assert all(serve())
                assert all(all(other.result()) for other in others)
            profiler.export_chrome_trace(str(tmp_path / f"{index}.json"))
    title, units = the_owner()._title, ["piece_0", "region_0", "piece_1"]
    spans = [span for index in range(3) for span in spans_in(tmp_path / f"{index}.json")]
    assert {span.name for span in spans} <= {f"{title}, bucket (5, 4)", f"{title}, uncaptured", *units}
    assert tuple(units) in {tuple(inner.name for inner in span.inner) for span in spans}
    assert len({span.thread for span in spans}) == 3


def test_a_unit_without_a_statement(trace: Trace) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def f(x: Tensor) -> Tensor:
        return (x + 1) @ torch.ops.aten.t.default(weight) + 1

    compiled = compile_host(f, split_ops=("aten::t",))
    x = rows(5)
    expected = call_often(compiled, x)
    results = []
    ((_, units),) = trace(lambda: results.append(compiled(x)))
    assert "region_0" in units
    assert torch.equal(results[0], expected)


def test_a_captured_op_may_have_spans_of_its_own(trace: Trace) -> None:
    def f(x: Tensor) -> Tensor:
        return toy.fresh(probe.marked(x) + 1) * 2

    compiled = compile_host(f)
    x = rows(5)
    expected = compiled(x)
    results: list[Tensor] = []
    ((_, units),) = trace(lambda: results.append(compiled(x)))
    assert units == [("piece_0", ["marked by the op"]), "region_0", "piece_1"]  # where its host code runs: once
    ((_, units),) = trace(lambda: results.append(compiled(x)))
    assert units == ["piece_0", "region_0", "piece_1"]
    assert all(torch.equal(result, expected) for result in results)


def test_the_function_with_ranges_goes_with_its_program(trace: Trace) -> None:
    compiled = compile_host(two)
    call_often(compiled, rows(5))
    trace(lambda: compiled(rows(5)))
    (entry,) = entries()
    kept = [weakref.ref(entry.program.with_ranges()), weakref.ref(entry.program.captured[0])]
    del entry
    the_owner().release()
    assert [reference() for reference in kept] == [None, None]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The example that `make demo` runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("serve_checkpoint")


@pytest.mark.exhaustive
def test_the_demo_writes_a_trace_of_one_decode_step(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "step.json"
    assert demo.main(["--tokens", "2", "--layers", "2", "--runner", "mrv1", "--trace", str(target)]) == 0
    printed = capsys.readouterr().out
    assert f"trace of one decode step of mrv1 minimal: {target} (open it in https://ui.perfetto.dev)" in printed
    ((call, units),) = [span.tree() for span in spans_in(target)]
    assert call.endswith("bucket (4,)")  # four requests, one token each
    # an SWA and a C4A layer, one region each
    assert units == ["piece_0", "region_0", "piece_1", "region_1", "piece_2"]
    assert "mrv1 minimal: 3 pieces captured" in printed


def test_the_demo_writes_no_trace_unless_asked(demo: ModuleType, tmp_path: Path) -> None:
    assert demo.parse_options([]).trace is None
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("as it was")
    assert demo.parse_options(["--trace", str(kept)]).trace == kept
    assert demo.parse_options(["--trace", str(new)]).trace == new
    assert kept.read_text() == "as it was"
    assert not new.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--trace", "no-such-folder/step.json"], "argument --trace: cannot write 'no-such-folder/step.json': No such"),
        (["--trace", "."], "argument --trace: cannot write '.': Is a directory"),
        (["--trace"], "argument --trace: expected one argument"),
        (["--trace", "step.json", "--tokens", "1"], "--trace shows a decode step, which needs --tokens of at least 2"),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused_before_the_work(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {complaint}")
    assert (printed.err.count("\n"), printed.out) == (1, "")
