"""Ops that break their promise in a full graph are caught and named; what promised nothing costs the full graph."""

from __future__ import annotations

import random
import threading
from contextlib import suppress

import pytest
import torch
from decode_ops import FACTOR, DecodeTrial, batch, decode, register
from interrupts import Interrupts
from runtime_helpers import owners
from torch import Tensor
from toy_ops import Host

import dsv4_compile
from dsv4_compile import counters, is_capturing, uniform_decode, uniform_query_len
from dsv4_compile.compat.thread_state import TorchState
from dsv4_compile.errors import CaptureError, ReplayMismatchError
from dsv4_compile.runtime.engines.host.engine import HostEngine


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


MORE_PHASES = ("replay", "replan")


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options", [{}, {"decode": "full", "aux_streams": 2}, {"piece_compiler": "aot_eager"}], ids=str
)
def test_a_host_read_in_a_capturable_op_is_caught_and_named(options: dict[str, object]) -> None:
    trial = DecodeTrial(attend=decode.attend_on_host, **options)
    trial.call(4, query_len=1)
    message = (
        r"split op decode::attend_on_host\.default is registered with capturable='decode', but no graph can hold what "
        r"it does: .*needs a device-to-host sync \(.*decode_ops\.py:\d+ in _attend_on_host: longest = int\(lens\.max"
        r"\(\)\)\), called at .*decode_ops\.py:\d+ in forward: self\.attend\("
    )
    state = {name: value.clone() for name, value in trial.model.state_dict().items()}
    with (
        pytest.raises(CaptureError, match=message),
        counters.expect(captures=0, full_replays=0, replans=0),
        torch.no_grad(),
        uniform_decode(),
    ):
        trial.compiled(*batch(4, 0))
    for name, value in trial.model.state_dict().items():
        assert torch.equal(value, state[name])  # nothing of the step has run
    trial.times(3, 4)  # in mixed batches the op is eager, and may
    with counters.expect(replays=1, full_replays=0):
        trial.call(4)


def test_who_goes_on_after_that_error_is_served_in_pieces(caplog: pytest.LogCaptureFixture) -> None:
    """After a capture that failed, a piece runs before it is captured again: a call that has run must not fail."""
    trial = DecodeTrial(attend=decode.attend_on_host)
    trial.call(4, query_len=1)
    with pytest.raises(CaptureError, match="attend_on_host"), torch.no_grad(), uniform_decode():
        trial.compiled(*batch(4, 0))
    trial.eager.load_state_dict(trial.model.state_dict())
    with counters.expect(replans=1, uncaptured_calls=1):
        trial.call(4, query_len=1)
    with counters.expect(replans=0, captures=1, replays=2, full_replays=0):
        trial.times(3, 4, query_len=1)
    assert len(said(caplog, "decode::attend_on_host.default runs eagerly from now on")) == 1
    assert len(said(caplog, "calls of uniform decode run in pieces: ")) == 1


def test_the_op_registered_as_never_runs_eagerly_again() -> None:
    register(attend_on_host="never")
    trial = DecodeTrial(attend=decode.attend_on_host)
    with counters.expect(full_replays=0, captures=1, replays=2):
        trial.times(3, 4, query_len=1)


def test_an_op_that_promised_nothing_costs_the_full_graph(caplog: pytest.LogCaptureFixture) -> None:
    """Its capture shows that it decides on the host; it is eager from then on, which leaves no whole step."""

    def attend(q: Tensor, cache: Tensor, lens: Tensor, out: Tensor) -> None:
        decode.attend(decode.sometimes_on_host(q), cache, lens, out)

    trial = DecodeTrial(2, attend=attend)
    trial.times(3, 4)
    trial.call(4, query_len=1)
    with counters.expect(replans=1, uncaptured_calls=1, captures=0, full_replays=0):
        trial.call(4, query_len=1)
    with counters.expect(replans=0, full_replays=0, captures=1, uncaptured_calls=1):
        trial.times(3, 4, query_len=1)
    with counters.expect(replans=0, full_replays=0, captures=0, replays=2):
        trial.times(2, 4)
    assert len(said(caplog, "decode::sometimes_on_host.default runs eagerly from now on")) == 1
    (told,) = said(caplog, "calls of uniform decode run in pieces: ")
    assert "as its capture showed" in told


def test_a_branch_that_no_capture_sees_is_found_by_the_full_check() -> None:
    def step(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        decode.frozen(x, out)
        return out + 1

    options = {"engine": "host", "check": "full"}
    compiled = torch.compile(step, backend="dsv4_piecewise", dynamic=True, options=options)
    with torch.no_grad():
        for _ in range(3):
            compiled(torch.ones(4, 4))
        with uniform_decode():
            for _ in range(3):
                compiled(torch.ones(4, 4))
            FACTOR[0] = 5.0
            try:
                with pytest.raises(ReplayMismatchError, match="the replay of whole_step differs"):
                    compiled(torch.ones(4, 4))
            finally:
                FACTOR[0] = 2.0
    assert counters.full_replays == 3


def test_the_old_runner_says_once_why_it_runs_in_pieces(caplog: pytest.LogCaptureFixture) -> None:
    trial = DecodeTrial(runner="mrv1")
    trial.times(3, 4)
    assert said(caplog, "uniform decode") == []
    with counters.expect(full_replays=0, replays=3, captures=0):
        trial.times(3, 4, query_len=1)
    (told,) = said(caplog, "calls of uniform decode run in pieces: ")
    assert "op decode::insert.default reads the step state slots through its argument 'slots'" in told


def test_who_promises_nothing_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    register(attend="never")
    DecodeTrial().times(3, 4, query_len=1)
    assert said(caplog, "uniform decode") == []


def test_an_interrupted_capture_leaves_both_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = DecodeTrial()
    trial.times(2, 4)
    trial.call(4, query_len=1)

    def fail(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostEngine, "capture", fail)
        with pytest.raises(KeyboardInterrupt), torch.no_grad(), uniform_decode():
            trial.compiled(*batch(4, 0))
    assert not any(owner._serving for owner in owners())
    with counters.expect(captures=1, full_replays=2, replays=3):
        trial.times(2, 4, query_len=1)
        trial.call(4)


@pytest.mark.parametrize("phase", ["capture", *(pytest.param(p, marks=pytest.mark.exhaustive) for p in MORE_PHASES)])
def test_a_decode_call_that_is_interrupted_leaves_nothing_behind(phase: str) -> None:
    """At a few lines and calls, drawn from all of them."""
    attend = decode.attend_on_host if phase == "replan" else decode.attend

    def prepared() -> DecodeTrial:
        trial = DecodeTrial(1, attend=attend)
        trial.times(2, 4)
        trial.times({"capture": 1, "replay": 2, "replan": 1}[phase], 4, query_len=1)
        if phase == "replan":
            with pytest.raises(CaptureError), torch.no_grad(), uniform_decode():
                trial.compiled(*batch(4, 0))
        return trial

    def call(trial: DecodeTrial) -> None:
        with torch.no_grad(), uniform_decode():
            trial.compiled(*batch(4, 0))

    counting = Interrupts("__call__", lines=True)
    trial = prepared()
    counting.run(lambda: call(trial))
    for at in random.Random(phase).sample(range(len(counting.places)), 5):
        torch._dynamo.reset()
        trial, interrupts = prepared(), Interrupts("__call__", lines=True, at=at)
        before = TorchState.now()
        with suppress(KeyboardInterrupt):
            interrupts.run(lambda: call(trial))  # noqa: B023
        assert TorchState.now() == before, counting.places[at]
        assert (uniform_query_len(), is_capturing()) == (None, False)
        assert all(owner._serving == {} for owner in owners()), counting.places[at]
        trial.eager.load_state_dict(trial.model.state_dict())
        for query_len in (None, 1, 1, None):
            with suppress(CaptureError):  # of the op that breaks its promise, once more
                trial.call(4, query_len)
            trial.eager.load_state_dict(trial.model.state_dict())


def test_a_call_inside_of_the_other_one_has_memory_of_its_own() -> None:
    """A split op of a mixed call calls the same model, in uniform decode."""
    inner: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.hook(x * 2, out)
        return out + x

    dsv4_compile.register_op("toy::hook", role="split", capturable="decode")
    compiled = torch.compile(step, backend="dsv4_piecewise", dynamic=True, options={"engine": "host"})
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
            with uniform_decode():
                compiled(x)

    def call(q: Tensor) -> Tensor:
        if not inner:
            inner.append(q)
            with uniform_decode():
                inner[0] = compiled(y)
        return 2 * q

    before, Host.function = Host.function, staticmethod(call)  # type: ignore[assignment]
    try:
        with torch.no_grad(), counters.expect(uncaptured_calls=1, replays=1, full_replays=0):
            result = compiled(x)
    finally:
        Host.function = before
    assert torch.equal(result, 5 * x)
    assert torch.equal(inner[0], 5 * y)


def test_threads_that_say_different_things() -> None:
    trial = DecodeTrial(decode="full")
    for query_len in (None, 1):
        trial.times(2, 4, query_len)
    failures: list[BaseException] = []
    expected: dict[int | None, Tensor] = {}
    arguments = batch(4, 0)
    for query_len in (None, 1):
        with torch.no_grad():
            trial.eager.load_state_dict(trial.model.state_dict())
            expected[query_len] = trial.eager(*arguments) if query_len is None else _in_decode(trial.eager, arguments)

    def serve(query_len: int | None) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    one = trial.compiled(*arguments) if query_len is None else _in_decode(trial.compiled, arguments)
                    torch.testing.assert_close(one, expected[query_len])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=serve, args=(query_len,)) for query_len in (None, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert counters.graphs_compiled == 1


def _in_decode(model: object, arguments: tuple[Tensor, ...]) -> Tensor:
    with uniform_decode():
        result: Tensor = model(*arguments)  # type: ignore[operator]
    return result
