"""A call that is interrupted anywhere on a CUDA device leaves its place in the order: nobody waits for it for ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, install
from interrupts import Interrupts
from runtime_helpers import the_owner

from benchmarks.toy import SPLIT_OP, Toy
from dsv4_compile import counters
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.runtime import captured

AROUND = ("CallOrder.", "CudaEngine.follow", "CudaEngine.leave", "CapturedCallable._serve", "CapturedCallable._end")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with torch.no_grad():
        yield install(monkeypatch)
    torch._dynamo.reset()
    captured._live.clear()  # a later reset would ask torch itself for their pools


@pytest.mark.sampled(3)
@pytest.mark.parametrize("calls_before", [0, 1, 2], ids=["warm-up", "capture", "replay"])
def test_an_interrupted_call_is_over(calls_before: int, cuda: FakeCuda) -> None:
    model, x = torch.compile(Toy(1), backend=dsv4_piecewise, options={"split_ops": [SPLIT_OP]}), torch.ones(4, 4)
    model(x)
    owner: Any = the_owner()
    first, second = cuda.stream(name="A"), cuda.stream(name="B")

    def begin() -> None:
        owner.release()
        for _ in range(calls_before):
            model(x)

    def call(interrupts: Interrupts) -> None:
        with cuda.on(first):
            interrupts.run(lambda: model(x))

    for _ in range(2):
        begin()
        places = Interrupts("__call__", lines=True)
        call(places)
    around = [at for at, place in enumerate(places.places) if place.split()[1].startswith(AROUND)]
    assert len(around) > 20
    for at in around:
        begin()
        with pytest.raises(KeyboardInterrupt):
            call(Interrupts("__call__", lines=True, at=at))
        assert owner._engine._order._calls == {}, places.places[at]
        assert owner._serving == {}, places.places[at]
        with cuda.on(second):
            for _ in range(3):  # it may have been interrupted before it had done anything
                model(x)
            with counters.expect(replays=1, captures=0):
                model(x)
    assert cuda.findings == []
