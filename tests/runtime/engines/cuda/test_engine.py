"""The cuda engine keeps the rules of capture: the examples that the host engine keeps, and whole programs, on a GPU."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_examples import EXAMPLES
from engine_streams import EXAMPLES as STREAMS
from engine_surroundings import EXAMPLES as SURROUNDINGS
from runtime_helpers import SPLIT_PROBES, Probe
from torch import Tensor, nn

from dsv4_compile import counters
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.runtime.engines.select import engine_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    # what Inductor and Triton warn of on a GPU is not ours to change
    pytest.mark.filterwarnings("default"),
]


RULES = EXAMPLES | SURROUNDINGS | STREAMS
DEVICE = "cuda"
WIDTH = 64
STREAMS_OF_NODES = (0, 1, 2, 0, 3)  # the products lie on streams of their own, whatever they weigh
ASSIGN_STREAMS = importlib.import_module("dsv4_compile.passes.assign_streams")
probe = torch.ops.probe


def engine() -> Any:
    return engine_for("cuda", torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    RULES[name](engine())


class Branches(nn.Module):
    """Three branches from one product, one of which writes a cache; then a split op, another product and a draw."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 8, requires_grad=False)
        self.register_buffer("cache", torch.zeros(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        a = (h @ self.w).sin()
        b = (h @ self.w.T).cos()
        c = h * 2
        probe.store(c, self.cache)
        result: Tensor = probe.give(a + b + c) @ self.w + self.cache.sum(0)
        return result + torch.rand_like(result)


def _schedule(before: Sequence[object], weights: Sequence[int], side_streams: int) -> tuple[int, ...]:
    return (*STREAMS_OF_NODES, *[0] * len(before))[: len(before)] if side_streams else (0,) * len(before)


class Trial:
    """A compiled model and its copy, which runs eagerly."""

    def __init__(self, **options: Any) -> None:
        self.model = Branches().to(DEVICE)
        self.eager = copy.deepcopy(self.model)
        options = {"split_ops": SPLIT_PROBES, "aux_streams": 3, **options}
        # by itself and not by its name, which torch finds only if the package is installed
        self._compiled = torch.compile(self.model, backend=dsv4_piecewise, dynamic=True, options=options)

    @torch.no_grad()
    def call(self, tokens: int) -> None:
        """Call both, and compare what they give, the cache, and the numbers that are drawn next."""
        x, found = torch.randn(tokens, WIDTH, device=DEVICE), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ASSIGN_STREAMS, "schedule", _schedule)
            for model in (self._compiled, self.eager):
                torch.manual_seed(tokens)
                found.append((model(x).clone(), torch.rand(2, device=DEVICE)))
        torch.testing.assert_close((*found[0], self.model.cache), (*found[1], self.eager.cache), rtol=1e-4, atol=1e-4)


OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "eager": {"piece_compiler": "eager"},
    "aot_eager": {"piece_compiler": "aot_eager"},
    "one stream": {"aux_streams": 0},
    "mrv1": {"runner": "mrv1"},
    "pools and outputs": {"pool": "bucket", "static_outputs": True},
    "full check": {"check": "full"},
    "bound": {"max_tokens": 16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_programs_are_as_eager(name):
    trial = Trial(**OPTIONS[name])
    for tokens in (9, 5, 9, 5):  # warm-up, then capture
        trial.call(tokens)
    with counters.expect(replays=8, captures=0, recaptures=0, uncaptured_calls=0):
        for tokens in (9, 5) * 4:
            trial.call(tokens)


def test_a_caller_on_a_stream_of_its_own():
    trial = Trial()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            trial.call(7)
    torch.cuda.synchronize()


def test_weights_that_move_are_captured_again():
    """With the only program of a pool goes the pool."""
    trial = Trial()
    for _ in range(3):
        trial.call(7)
    for captures in (1, 1):
        trial.model.w.data = trial.model.w.data.clone()
        with counters.expect(recaptures=captures, replays=3):
            for _ in range(3):
                trial.call(7)


def test_another_thread_captures_what_this_one_warmed_up():
    trial, failures = Trial(), []
    trial.call(7)

    def capture() -> None:
        try:
            for _ in range(3):
                trial.call(7)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    assert failures == []
    trial.call(7)


def test_a_graph_that_goes_leaves_the_cublas_workspaces_of_others():
    """So long a sum is split between blocks, which meet in a workspace."""
    long = 1 << 15
    x, w = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((8, long), (long, WIDTH)))
    out, expected = (torch.zeros(8, WIDTH, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    expected.copy_(x @ w)
    pool = engine().make_pool()
    engine().warm_up(lambda: out.copy_(x @ w))
    kept, gone = (engine().capture(lambda: out.copy_(x @ w), pool, name=name) for name in ("kept", "gone"))
    gone.release()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    out.zero_()
    kept.replay()
    torch.testing.assert_close(out, expected)


# two streams, and what others do to memory; tests/runtime/engines/cuda/test_stream_order.py has the same without a GPU

LONG = 1 << 15  # so long a sum is split between blocks, which meet in a workspace of cuBLAS
CYCLES = 200_000_000  # a tenth of a second or so


def long_product(width: int) -> tuple[Any, Tensor, Tensor]:
    """A compiled and captured function of two products, and its arguments."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        result: Tensor = probe.give(x @ w) + (x @ w)
        return result

    x, w = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((8, LONG), (LONG, width)))
    options = {"split_ops": SPLIT_PROBES, "piece_compiler": "eager"}
    compiled = torch.compile(f, backend=dsv4_piecewise, dynamic=True, options=options)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, w), f(x, w))
    return compiled, x, w


@contextmanager
def sleeping(op: str) -> Iterator[None]:
    """Have an op keep its stream busy before it does anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "called", staticmethod(lambda name: torch.cuda._sleep(CYCLES) if name == op else None))
        yield


@torch.no_grad()
def test_two_models_on_two_streams_share_no_workspace_at_a_time():
    calls = [(torch.cuda.Stream(), *long_product(width)) for width in (64, 128)]
    expected = [compiled(x, w) for _, compiled, x, w in calls]  # one after the other
    torch.cuda.synchronize()
    results: list[list[Tensor]] = []
    for _ in range(200):
        results.append([])
        for stream, compiled, x, w in calls:
            with torch.cuda.stream(stream):
                results[-1].append(compiled(x, w))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for found in results for pair in zip(found, expected, strict=True))


@torch.no_grad()
def test_a_call_on_another_stream_comes_after_the_last_one():
    compiled, x, w = long_product(64)
    inputs, streams = (x, torch.randn_like(x)), [torch.cuda.Stream() for _ in range(2)]
    expected, found = [compiled(value, w) for value in inputs], []
    torch.cuda.synchronize()
    with sleeping("give"):
        for stream, value in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(compiled(value, w))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@torch.no_grad()
def test_results_of_a_warm_up_are_not_handed_out_while_they_are_read():
    model = torch.compile(lambda x: x * 2 + 1, backend=dsv4_piecewise, dynamic=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = torch.ones(1 << 20, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        y = model(x)  # the warm-up of its size
        torch.cuda._sleep(CYCLES)
        z = y.clone()
        del y
    with torch.cuda.stream(streams[1]):
        kept = [model(torch.zeros((1 << 20) + extra, device=DEVICE)) for extra in range(1, 4)]
    torch.cuda.synchronize()
    assert torch.equal(z, torch.full_like(z, 3))
    del kept


@torch.no_grad()
def test_a_graph_keeps_its_workspace_when_others_clear_them():
    """As `mode="reduce-overhead"` does; whoever gets memory afterwards must not find our products in it."""
    compiled, x, w = long_product(64)
    expected = compiled(x, w)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    sentinel = [torch.full((1 << 26,), 7.0, device=DEVICE) for _ in range(4)]  # 1 GiB
    for _ in range(3):
        assert torch.equal(compiled(x, w), expected)
    assert all(bool((part == 7).all()) for part in sentinel)


def test_the_streams_of_the_engine_are_nobody_elses():
    pytest.importorskip("cuda.bindings.driver", reason="torch hands its streams out in turn, and we get some of them")
    made = engine()
    made.warm_up(lambda: None, streams=3)
    ours = {stream.cuda_stream for stream in (made._origin, made._stream, *made._side_streams._streams)}
    assert len(ours) == 2 + 3
    assert ours.isdisjoint(torch.cuda.Stream().cuda_stream for _ in range(64))


@torch.no_grad()
def test_a_capture_gets_the_memory_that_torch_has_cached():
    """Nothing is given back while anything is captured; so the capture is made again."""
    x, out = torch.ones(1 << 26, device=DEVICE), torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total, room = torch.cuda.mem_get_info()[1], 1 << 30
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        torch.empty(room - (64 << 20), dtype=torch.uint8, device=DEVICE)  # cached, as soon as it is made
        graph = engine().capture(lambda: out.copy_((x * 2)[:1]), engine().make_pool(), name="one")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    graph.replay()
    assert out.item() == 2


def test_a_first_capture_in_inference_mode_is_no_hindrance_to_others():
    """A process of its own: what a generator keeps for graphs is made by the first capture."""
    script = """
import torch
from dsv4_compile.runtime.engines.select import engine_for
engine, out = engine_for("cuda", torch.device("cuda")), torch.zeros(4, device="cuda")
for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
    with mode():
        graph = engine.capture(lambda: out.copy_(torch.rand(4, device="cuda")), engine.make_pool(), name="one")
        for _ in range(2):
            before = out.clone()
            graph.replay()
            assert not torch.equal(out, before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
