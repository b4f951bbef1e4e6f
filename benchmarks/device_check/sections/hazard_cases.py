"""Hazards of order: two streams, several threads, and a piece that is captured before it was warm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from dsv4_compile import counters
from dsv4_compile.runtime.engines.capture_state import is_capturing
from dsv4_compile.runtime.engines.select import engine_for

from ..bench import Bench
from ..hazard import Case, Finding, on, register_into, right, sleep, streams
from ..models import compiled, inductor_of
from ..timing import synchronise

CASES: dict[str, Case] = {}
LONG = 1 << 15  # so long a sum is split between blocks, which meet in a workspace of cuBLAS
SPLIT = "hazard::pause"
_library = Library("hazard", "DEF")
_library.define("pause(Tensor x) -> Tensor")
_library.impl("pause", lambda x: _pause(x), "CompositeExplicitAutograd")
torch.library.register_fake(SPLIT, lambda x: torch.empty_like(x), lib=_library)
_paused: list[Callable[[], None]] = []


def _pause(x: Tensor) -> Tensor:
    for pause in _paused:
        pause()
    return x.clone()


def long_product(bench: Bench, width: int) -> tuple[Callable[..., Any], Tensor, Tensor]:
    """A captured function of two products, and its arguments."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        paused: Tensor = torch.ops.hazard.pause(x @ w)
        return paused + (x @ w)

    long = bench.pick(LONG, 64)
    torch.manual_seed(width)
    x, w = (torch.randn(size, device=bench.device, dtype=torch.bfloat16) for size in ((8, long), (long, width)))
    call = compiled(f, split_ops=[SPLIT], piece_compiler="eager")
    for _ in range(3):
        torch.testing.assert_close(call(x, w), f(x, w))
    return call, x, w


@register_into(CASES, "A1")
def two_models_on_two_streams(bench: Bench) -> Finding:
    """two models replayed on two streams share no workspace at a time"""
    calls = [(stream, *long_product(bench, width)) for stream, width in zip(streams(bench, 2), (64, 128), strict=True)]
    expected = [call(x, w) for _, call, x, w in calls]
    synchronise(bench.device)
    wrong = 0
    for _ in range(bench.pick(200, 2)):
        found = []
        for stream, call, x, w in calls:
            with on(stream):
                found.append(call(x, w))
        synchronise(bench.device)
        wrong += sum(not torch.equal(*pair) for pair in zip(found, expected, strict=True))
    return right(wrong == 0, f"{wrong} wrong results")


@register_into(CASES, "A2")
def results_of_warm_ups(bench: Bench) -> Finding:
    """the result of a warm-up is not handed out while another stream reads it"""
    call, size = compiled(lambda x: x * 2 + 1), bench.pick(1 << 20, 1 << 8)
    first, second = streams(bench, 2)
    x = torch.ones(size, device=bench.device)
    synchronise(bench.device)
    with on(first):
        y = call(x)
        sleep(bench)
        z = y.clone()
        del y
    with on(second):
        kept = [call(torch.zeros(size + more, device=bench.device)) for more in range(1, 4)]
    synchronise(bench.device)
    del kept
    return right(torch.equal(z, torch.full_like(z, 3)))


@register_into(CASES, "A3")
def one_model_on_two_streams(bench: Bench) -> Finding:
    """a call on another stream comes after the last one"""
    call, x, w = long_product(bench, 64)
    inputs = (x, torch.randn_like(x))
    expected = [call(value, w) for value in inputs]
    synchronise(bench.device)
    found = []
    _paused.append(lambda: sleep(bench))
    try:
        for stream, value in zip(streams(bench, 2), inputs, strict=True):
            with on(stream):
                found.append(call(value, w))
    finally:
        _paused.clear()
    synchronise(bench.device)
    return right(all(torch.equal(*pair) for pair in zip(found, expected, strict=True)))


@register_into(CASES, "A5")
def streams_of_the_engine(bench: Bench) -> Finding:
    """streams of the engine are nobody else's"""
    if bench.device != "cuda":
        return Finding("a CPU has none", "a CPU has none")
    engine: Any = engine_for("auto", torch.device("cuda"))
    engine.warm_up(lambda: None, streams=3)
    ours = {stream.cuda_stream for stream in (engine._origin, engine._stream, *engine._side_streams._streams)}
    shared = ours & {torch.cuda.Stream().cuda_stream for _ in range(64)}
    return Finding(f"{len(shared)} of {len(ours)} are shared", f"0 of {len(ours)} are shared")


@register_into(CASES, "B2")
def warm_by_other_functions(bench: Bench) -> Finding:
    """what is captured has run before, also if the first call had inputs that share memory"""

    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        y: Tensor = torch.ops.hazard.pause((x * 2).sin())
        return (y + cache.sum()).cos()

    def inputs(size: int, *, shares: bool) -> tuple[Tensor, Tensor]:
        x = torch.ones(size, device=bench.device)
        return x, x if shares else torch.zeros(size, device=bench.device)

    call = compiled(f, split_ops=[SPLIT], piece_compiler=inductor_of(bench))
    call(*inputs(4, shares=False))
    call(*inputs(9, shares=True))
    is_right = []
    for _ in range(3):
        given = inputs(9, shares=False)
        copies = tuple(tensor.clone() for tensor in given)
        is_right.append(torch.allclose(call(*given), f(*copies), rtol=1e-4, atol=1e-4))
    return right(all(is_right))


@register_into(CASES, "B3")
def other_alignment(bench: Bench) -> Finding:
    """a Triton kernel that was warm for an unaligned tensor is captured for the aligned copy of it"""
    op = SPLIT
    if bench.device == "cuda":
        from ..triton_op import ADD_ONE

        op = ADD_ONE
    namespace, _, name = op.partition("::")
    kernel = getattr(getattr(torch.ops, namespace), name)
    call = compiled(lambda x: kernel(x * 1) + kernel(x), split_ops=["aten::bmm"], piece_compiler="eager")
    inputs = [torch.arange(65.0, device=bench.device)[1:] + step for step in range(4)]
    before = counters.captures
    pairs = [(call(x), kernel(x * 1) + kernel(x)) for x in inputs]
    synchronise(bench.device)
    is_right = all(torch.equal(*pair) for pair in pairs)
    return right(is_right and counters.captures > before, "wrong numbers, or never captured")


@register_into(CASES, "B6")
def draws_meanwhile(bench: Bench) -> Finding:
    """another thread draws numbers while this one captures (before torch 2.13 CUDA's generator refuses)"""
    seen: list[str] = []

    def draw() -> None:
        try:
            torch.rand(4, device=bench.device)
            seen.append("draws")
        except RuntimeError as error:
            print(error)
            seen.append("refuses")

    def record() -> None:
        assert is_capturing()
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join(10)
        out.copy_(x)

    x, out = torch.ones(4, device=bench.device), torch.zeros(4, device=bench.device)
    engine = engine_for("auto", torch.device(bench.device))
    engine.capture(record, engine.make_pool(), name="one").replay()
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    return Finding(seen[0], "refuses" if old and bench.device == "cuda" else "draws")


@register_into(CASES, "B7")
def first_capture_in_inference_mode(bench: Bench) -> Finding:
    """a first capture in inference mode is no hindrance to captures in other modes"""
    engine, out = engine_for("auto", torch.device(bench.device)), torch.zeros(4, device=bench.device)
    fresh = []

    def draw() -> Tensor:
        return out.copy_(torch.rand(4, device=bench.device))

    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            graph = engine.capture(draw, engine.make_pool(), name="one")
            for _ in range(2):
                before = out.clone()
                graph.replay()
                fresh.append(not torch.equal(out, before))
    return right(all(fresh), "a replay drew the same numbers again")


@register_into(CASES, "B8")
def other_libraries_in_other_threads(bench: Bench) -> Finding:
    """a thread captures cuFFT, cuSOLVER and cuDNN after another one warmed them up (nothing is judged)"""
    x = torch.randn(4, 4, 16, 16, device=bench.device)
    work: dict[str, Callable[[], Tensor]] = {
        "fft": lambda: torch.fft.fft(x).real,
        "solve": lambda: torch.linalg.solve(x, x),
        "convolution": lambda: torch.nn.functional.conv2d(x, x[:, :, :3, :3]),
    }
    seen = {name: _captured_by_another_thread(bench, run) for name, run in work.items()}
    return Finding("; ".join(f"{name}: {what}" for name, what in seen.items()), None)


def _captured_by_another_thread(bench: Bench, run: Callable[[], Tensor]) -> str:
    engine, out = engine_for("auto", torch.device(bench.device)), run()
    engine.warm_up(run)
    said: list[str] = []

    def capture() -> None:
        try:
            engine.capture(lambda: out.copy_(run()), engine.make_pool(), name="one").replay()
            said.append("captured")
        except Exception as error:
            said.append(f"{type(error).__name__}"[:60])

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    return said[0]
