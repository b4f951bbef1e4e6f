"""A decode step on the cuda engine is one graph launch; over a stand-in for torch.cuda that knows what is ordered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_ops import DecodeTrial, register
from fake_cuda import FakeCuda, install
from runtime_helpers import Probe
from torch import Tensor

from dsv4_compile import counters, register_op, uniform_decode
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.errors import CaptureError
from dsv4_compile.runtime import captured


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    register()
    with torch.no_grad():
        yield install(monkeypatch)
    torch._dynamo.reset()
    captured._live.clear()  # a later reset would ask torch itself for their pools


def trial_of(**options: Any) -> DecodeTrial:
    trial = DecodeTrial(engine="auto", **options)
    trial.is_compared = False  # kernels run while they are recorded here, so numbers mean nothing
    return trial


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{"aux_streams": 2, "max_tokens": 8}, {}, {"pool": "bucket"}], ids=str)
def test_a_decode_step_is_one_launch(options: dict[str, Any], cuda: FakeCuda) -> None:
    trial = trial_of(**options)
    for query_len in (1, None):
        trial.times(2, 4, query_len)
    with counters.expect(full_replays=2, replays=4, captures=0, uncaptured_calls=0):
        for query_len, launches in ((1, 1), (None, 3), (1, 1), (None, 3)):
            before = cuda.replays
            trial.call(4, query_len)
            assert cuda.replays - before == launches
    assert cuda.findings == []


def test_two_streams_in_turn(cuda: FakeCuda) -> None:
    """What both plans share, the arena and the pool, is used by one call at a time."""
    trial = trial_of()
    streams = cuda.stream(name="A"), cuda.stream(name="B")
    for index, query_len in enumerate((None, 1, None, 1, 1, None, None, 1)):
        with cuda.on(streams[index % 2]):
            trial.call(4, query_len)
    assert counters.full_replays == 3
    assert cuda.findings == []


def step(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(torch.ops.probe.give(torch.mm(x, w)), w)


def test_another_thread_in_the_middle_of_a_call_in_pieces(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another stream it runs uncaptured: both plans have one arena."""
    register_op("probe::give", role="split", capturable="decode")
    compiled = torch.compile(step, backend=dsv4_piecewise, dynamic=True)
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(2):
        compiled(x, w)
        with uniform_decode():
            compiled(x, w)
    failures: list[BaseException] = []
    streams = cuda.stream(name="A"), cuda.stream(name="B")
    for stream in streams:
        stream.wait_stream(cuda.default)

    @torch.no_grad()
    def decode_meanwhile() -> None:
        try:
            with cuda.on(streams[1]), uniform_decode(), counters.expect(uncaptured_calls=1, full_replays=0):
                compiled(x, w)
        except BaseException as failure:
            failures.append(failure)

    def in_thread(op: str) -> None:
        monkeypatch.setattr(Probe, "called", staticmethod(lambda op: None))
        thread = threading.Thread(target=decode_meanwhile)
        thread.start()
        thread.join()
        failures.append(StopIteration())

    monkeypatch.setattr(Probe, "called", staticmethod(in_thread))
    with cuda.on(streams[0]):
        compiled(x, w)
    assert [type(failure) for failure in failures] == [StopIteration]
    assert cuda.findings == []
    with cuda.on(streams[1]), uniform_decode(), counters.expect(full_replays=1):
        compiled(x, w)
    assert cuda.findings == []


def test_what_cuda_refuses_in_a_capturable_op_is_named(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(op: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    register_op("probe::give", role="split", capturable={"cpu": "decode"})  # the device of this stand-in
    monkeypatch.setattr(Probe, "called", staticmethod(synchronize))
    compiled = torch.compile(step, backend=dsv4_piecewise, dynamic=True)
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    with uniform_decode():
        compiled(x, w)
        message = (
            r"split op probe::give\.default is registered with capturable='decode', but .*not permitted when stream"
        )
        with pytest.raises(CaptureError, match=message):
            compiled(x, w)
        with counters.expect(replans=1, uncaptured_calls=1):
            compiled(x, w)  # has run by the time that it is refused
        with counters.expect(replays=2, full_replays=0):
            for _ in range(3):
                compiled(x, w)
