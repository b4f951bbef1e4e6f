"""The cuda engine orders what a GPU would be free to do in any order: over a stand-in for torch.cuda, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, install
from torch import Tensor

from benchmarks.attention_stack import first_step, mark_request_dims, stack_with, tiny_config
from benchmarks.region import one_step
from benchmarks.toy import SPLIT_OP, Toy
from dsv4_compile import counters
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.runtime.engines.select import engine_for


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with torch.no_grad():
        yield install(monkeypatch)
    torch._dynamo.reset()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=dsv4_piecewise, dynamic=True, options={"split_ops": [SPLIT_OP], **options})


def two_streams(cuda: FakeCuda) -> tuple[Any, Any]:
    """Both after everything so far, and none after the other."""
    streams = cuda.stream(name="A"), cuda.stream(name="B")
    for stream in streams:
        stream.wait_stream(cuda.default)
    return streams


def other(x: Tensor, w: Tensor) -> Tensor:
    q = torch.mm(x, w)
    out = torch.empty_like(q)
    torch.ops.dispatch_benchmark.attend(q, out)
    return torch.mm(out, w)


def one_model_on_one_stream(cuda: FakeCuda) -> None:
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    for _ in range(5):
        model(x)


def one_model_on_two_streams(cuda: FakeCuda) -> None:
    """Arena, copied in inputs and pool are those of the bucket."""
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    for _ in range(3):
        model(x)
    for stream in two_streams(cuda):
        with cuda.on(stream):
            model(x)


def two_models_on_two_streams(cuda: FakeCuda) -> None:
    """One thread captured both, so they write one workspace of cuBLAS."""
    model, second, x, w = compiled(Toy(2)), compiled(other), torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(3):
        model(x), second(x, w)
    for stream, call in zip(two_streams(cuda), (lambda: model(x), lambda: second(x, w)), strict=True):
        with cuda.on(stream):
            call()


def a_warm_up_beside_a_replay(cuda: FakeCuda) -> None:
    """The warm-up has the workspace of the stream that the other model was captured on."""
    model, second, x, w = compiled(Toy(2)), compiled(other), torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(3):
        model(x)
    for stream, call in zip(two_streams(cuda), (lambda: model(x), lambda: second(x, w)), strict=True):
        with cuda.on(stream):
            call()


def results_of_a_warm_up_are_freed(cuda: FakeCuda) -> None:
    """They are read on the stream of their caller, and lie in memory of the engine's."""
    first, second = compiled(Toy(2)), compiled(Toy(2))
    a, b = two_streams(cuda)
    with cuda.on(a):
        y = first(torch.ones(4, 4))
        with cuda.watching():
            y.mul(2)
        del y
    with cuda.on(b):
        second(torch.ones(5, 4))


def an_arena_is_freed_after_a_call_on_another_stream(cuda: FakeCuda) -> None:
    model, x = compiled(Toy(2)), torch.ones(4, 4)
    a, b = two_streams(cuda)
    for stream in (a, a, b):
        with cuda.on(stream):
            model(x)
    torch._dynamo.reset()
    with cuda.on(a), cuda.watching():
        for _ in range(4):
            torch.ones(4, 4)
    with cuda.on(a):
        compiled(Toy(1))(x)


HAZARDS: list[Callable[[FakeCuda], None]] = [
    one_model_on_two_streams,
    two_models_on_two_streams,
    a_warm_up_beside_a_replay,
    results_of_a_warm_up_are_freed,
    an_arena_is_freed_after_a_call_on_another_stream,
]


def test_work_on_one_stream_is_ordered(cuda: FakeCuda) -> None:
    one_model_on_one_stream(cuda)
    assert cuda.findings == []


@pytest.mark.parametrize("scenario", HAZARDS, ids=lambda scenario: scenario.__name__)
def test_work_on_two_streams_is_not_ordered_yet(scenario: Callable[[FakeCuda], None], cuda: FakeCuda) -> None:
    scenario(cuda)
    assert cuda.findings != []


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_pieces_of_attention_on_side_streams_are_ordered(compiler: str, cuda: FakeCuda) -> None:
    stack, _ = stack_with(tiny_config((4, 4, 128, 0)), 8, "cpu")
    inputs = torch.zeros(8, dtype=torch.long), torch.arange(8), mark_request_dims(first_step(8))
    options = {"runner": "mrv2", "aux_streams": 3, "piece_compiler": compiler}
    step = one_step(compiled(stack, **options), inputs, renews=False)
    with counters.expect(captures=1, replays=3):
        for _ in range(4):
            step()
    assert cuda.findings == []
    assert cuda.most_streams == 5  # where the capture begins, that of the work, and three beside it


def test_the_stand_in_finds_a_stream_that_is_not_joined(cuda: FakeCuda) -> None:
    side = cuda.stream(name="side")

    def fork(x: Tensor) -> None:
        side.wait_stream(cuda.current)
        with cuda.on(side):
            x.add_(1)

    engine = engine_for("host", torch.device("cpu"))
    with cuda.watching():
        x = torch.ones(4)
        engine.capture(lambda: fork(x), engine.make_pool(), name="one")
    assert cuda.findings == ["UNJOINED side at the end of a capture"]


def test_the_stand_in_finds_a_capture_that_waits_for_work_outside(cuda: FakeCuda) -> None:
    engine = engine_for("host", torch.device("cpu"))
    outside = cuda.stream(name="outside")
    with cuda.watching():
        x = torch.ones(4)
        wait = lambda: (cuda.current.wait_stream(outside), x.add_(1))  # noqa: E731
        engine.capture(wait, engine.make_pool(), name="one")
    assert [finding.split()[0] for finding in cuda.findings] == ["UNCAPTURED"]


def test_the_stand_in_finds_memory_of_one_stream_that_another_still_uses(cuda: FakeCuda) -> None:
    a, b = two_streams(cuda)
    with cuda.watching(), cuda.on(a):
        x = torch.ones(4)
        b.wait_stream(a)
        with cuda.on(b):
            y = x + 1
        del x
        again = torch.ones(4)
    assert [finding.split()[0] for finding in cuda.findings] == ["REUSE"]
    del y, again
