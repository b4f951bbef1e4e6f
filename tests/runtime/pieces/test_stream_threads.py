"""Streams and compiled parts while other things go on: nested calls, threads, resets, collections, moved weights."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import pytest
import torch
from case_helpers import rows
from runtime_helpers import Allocations, Probe, compile_host, entries, live_bytes, the_owner
from runtime_helpers import allocations as allocations  # a fixture
from stream_runs import on_streams, replays_in_order
from subgraph_options import PARTED
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.runtime.engines.capture_state import current_streams, no_capture_elsewhere, offering, recording
from dsv4_compile.runtime.engines.host.engine import HostEngine

probe = torch.ops.probe
# of x @ w, shift, h @ h.T, mul, store
STREAMS = (0, 1, 2, 0, 3)


class Branches(nn.Module):
    """Three branches from one product; one calls an op with a body, another writes a cache."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        a = probe.shift(h)
        b = h @ h.T
        c = h * 2
        probe.store(c, self.cache)
        result: Tensor = probe.give(b @ a + c) + self.w.sum()
        return result


def compiled_on_streams(model: nn.Module, **options: Any) -> Any:
    """Compiled with a first call, so that its streams are settled."""
    with on_streams(STREAMS), torch.no_grad():
        compiled = compile_host(model, **{**PARTED, **options})
        compiled(rows(5))
    return compiled


def check_calls(compiled: Any, model: Branches, sizes: tuple[int, ...]) -> None:
    """Results are those of eager; the cache is another matter, since it is read by nothing."""
    for n in sizes:
        x = rows(n)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Lets the body of `shift`, which runs on a side stream, do something once: while it is recorded."""
    todo: list[Callable[[], object]] = []

    def called(op: str) -> None:
        if op == "shift" and current_streams() is not None and todo:
            todo.pop()()

    monkeypatch.setattr(Probe, "called", staticmethod(called))
    yield todo.append
    assert not todo, "nothing was recorded on streams"


# calls inside of calls


class OtherStreams:
    """Streams of somebody else."""

    def on(self, stream: int) -> AbstractContextManager[None]:
        self.record(stream)

    def record(self, stream: int) -> NoReturn:
        raise AssertionError(f"stream {stream} of a captured graph around the call is taken")

    def wait(self, stream: int, event: object) -> None:
        self.record(stream)


@pytest.mark.parametrize("engine", ["off", "host"])
def test_a_call_inside_of_a_recording_takes_none_of_its_streams(engine: str) -> None:
    """They fork from a stream 0 that may be later than what the call takes, and may be fewer than it has parts for."""
    model = Branches()
    compiled = compiled_on_streams(model, engine=engine)
    with offering(OtherStreams()):
        check_calls(compiled, model, (6,))  # as an op calls it: uncaptured, or its own warm-up
        assert isinstance(current_streams(), OtherStreams)


def test_warm_ups_and_captures_inside_of_a_warm_up_do_not_wait_for_it() -> None:
    """An op of a piece calls a compiled function of its own, while an engine keeps other captures away."""
    reached = []

    def nested() -> None:
        with no_capture_elsewhere():
            with no_capture_elsewhere():
                reached.append("warm-up")
            with recording("piece of the inner function"), no_capture_elsewhere():
                reached.append("capture")

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(timeout=250)
    assert reached == ["warm-up", "capture"]


# threads


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [1, 2], ids=["a thread for each model", "two threads for each model"])
def test_threads_capture_and_replay_models_of_several_streams(threads: int) -> None:
    """A full check takes what another thread writes to the cache meanwhile for a mistake of the replay."""
    models = [Branches(seed) for seed in range(3)]
    options = {"check": "full" if threads == 1 else "addresses", "pool": "bucket", "aux_stream_max_tokens": 5}
    with replays_in_order(3):
        compiled = [compiled_on_streams(model, **options) for model in models]
        with ThreadPoolExecutor(3 * threads) as pool:
            pairs = [*zip(compiled, models, strict=True)] * threads
            jobs = [pool.submit(check_calls, *pair, (5, 6, 5, 6, 5)) for pair in pairs]
        for job in jobs:
            job.result()


def test_streams_of_one_thread_are_not_offered_to_another(inside: Callable[[Callable[[], object]], None]) -> None:
    """A call of another thread, while this one records on a side stream, runs on its own."""
    model, other = Branches(), Branches(2)
    compiled, elsewhere = compiled_on_streams(model), compiled_on_streams(other)
    seen = []

    def call_elsewhere() -> None:
        seen.append((current_streams(), dsv4_compile.is_capturing()))
        check_calls(elsewhere, other, (7,))  # its warm-up
        check_calls(compiled, model, (5,))  # busy, so uncaptured

    def call_and_wait() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call_elsewhere).result()

    inside(call_and_wait)
    check_calls(compiled, model, (5, 5, 5))
    assert seen == [(None, False)]


# bad moments


@pytest.mark.parametrize("moment", [gc.collect, torch._dynamo.reset], ids=["collection", "reset"])
def test_bad_moments_on_a_side_stream(moment: Callable[[], object], inside: Any) -> None:
    model = Branches()
    compiled = compiled_on_streams(model)
    inside(moment)
    check_calls(compiled, model, (5, 5, 5, 6, 6, 6))


def test_a_model_that_dies_while_another_one_records(inside: Any) -> None:
    """What its captures held goes in the middle of a captured graph."""
    model, doomed = Branches(), [Branches(2)]
    compiled, dying = compiled_on_streams(model), [compiled_on_streams(doomed[0])]
    check_calls(dying[0], doomed[0], (5, 5))
    weight = weakref.ref(doomed[0].w)

    def let_it_die() -> None:
        doomed.clear()
        dying.clear()
        gc.collect()

    inside(let_it_die)
    check_calls(compiled, model, (5, 5, 5))
    assert weight() is None


class InvalidStreams:
    """Those of a capture that becomes invalid: streams take no events any more."""

    is_invalid = False

    def on(self, stream: int) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, stream: int) -> object:
        if self.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        return object()

    def wait(self, stream: int, event: object) -> None:
        pass


def test_the_first_error_counts_when_streams_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = InvalidStreams()

    def read_back(op: str) -> None:
        streams.is_invalid = True
        raise ValueError("what the user has to know")

    def warm_up(self: HostEngine, run: Callable[[], None], **kwargs: Any) -> None:
        with offering(streams):
            run()

    compiled = compiled_on_streams(Branches())
    monkeypatch.setattr(HostEngine, "warm_up", warm_up)
    monkeypatch.setattr(Probe, "called", staticmethod(read_back))
    with pytest.raises(ValueError, match="what the user has to know"), torch.no_grad():
        compiled(rows(6))


# memory


@pytest.mark.exhaustive
def test_captures_of_moved_weights_do_not_pile_up(allocations: Allocations) -> None:
    """Temporaries live until streams are joined, and no longer; those of a dropped recording go with it."""
    model = Branches()
    compiled = compiled_on_streams(model)
    check_calls(compiled, model, (5, 5))
    pool, before = the_owner()._pool.nbytes, live_bytes()
    assert pool > 0
    with counters.expect(recaptures=6, captures=6):
        for _ in range(6):
            model.w.data = model.w.data.clone()
            check_calls(compiled, model, (5, 5))
    assert (the_owner()._pool.nbytes, live_bytes()) == (pool, before)
    assert len(entries()) == len(allocations.alive) == 1
    torch._dynamo.reset()
    gc.collect()
    assert allocations.alive == []


def test_temporaries_are_kept_for_streams_and_not_without() -> None:
    """In order, the memory of a dead temporary goes to the next one; on streams another one may still read it."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(6):
            x = x @ x
        result: Tensor = torch.ops.toy.fresh(x)
        return result

    nbytes = {}
    for streams in ((), (0, 1)):
        with on_streams(streams), torch.no_grad():
            torch._dynamo.reset()
            compiled = compile_host(chain, aux_streams=1, piece_compiler="aot_eager")
            for _ in range(3):
                compiled(rows(4))
        nbytes[streams] = the_owner()._pool.nbytes
    assert nbytes[()] < nbytes[0, 1]
