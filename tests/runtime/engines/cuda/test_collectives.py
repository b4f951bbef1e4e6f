"""Collectives on the cuda engine: recorded where the backend is NCCL, outside of graphs elsewhere; over a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_cuda import FakeCuda, install
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_compile import counters
from dsv4_compile.analysis import effects
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.graph.collective_call import CollectiveCall
from dsv4_compile.runtime import captured
from dsv4_compile.runtime.pieces.replay_check import CheckedReplay

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

if dist.is_available():
    import torch.distributed._functional_collectives as fc
    from processes import free_port, gloo_group


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with torch.no_grad(), gloo_group(0, 1, free_port()):
        yield install(monkeypatch)
        torch._dynamo.reset()
    captured._live.clear()  # a later reset would ask torch itself for their pools


@pytest.fixture
def calls(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called of the collectives: each with "recorded" if it becomes part of a graph, or "run"."""
    noted: list[str] = []
    call = CollectiveCall.__call__

    def noting(self: CollectiveCall, *args: Any, **kwargs: Any) -> Any:
        noted.append(f"{self.__name__} {'recorded' if cuda.capturing else 'run'}")
        return call(self, *args, **kwargs)

    monkeypatch.setattr(CollectiveCall, "__call__", noting)
    return noted


def say(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Let groups have a backend, and collectives a tensor of a GPU, which nothing here has."""
    with FakeTensorMode():
        elsewhere = torch.empty(1, device="cuda")
    why = effects._why_no_graph_holds
    monkeypatch.setattr(effects, "backend_of", lambda group, device: backend)
    monkeypatch.setattr(effects, "_why_no_graph_holds", lambda op, bound: why(op, {**bound, "elsewhere": elsewhere}))


def step(x: Tensor) -> Tensor:
    total = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
    return fc.all_gather_tensor(total + 1, 0, dist.group.WORLD) * 3


ONCE = ["all_reduce", "wait_tensor", "all_gather_into_tensor", "wait_tensor"]


def once(how: str) -> list[str]:
    return [f"{name} {how}" for name in ONCE]


def test_those_of_nccl_are_recorded(cuda: FakeCuda, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up runs each once; a capture records it, to be run by the replay behind it; a replay calls nothing."""
    say(monkeypatch, "nccl")
    compiled = torch.compile(step, backend=dsv4_piecewise, dynamic=True)
    for launches, expected in ((0, once("run")), (1, once("recorded")), (1, []), (1, [])):
        before = cuda.replays
        calls.clear()
        compiled(torch.arange(4.0))
        assert (calls, cuda.replays - before) == (expected, launches)
    assert (counters.captures, counters.replays) == (1, 3)
    assert cuda.findings == []


@pytest.mark.parametrize(
    ("backend", "options"),
    [("gloo", {}), ("ucc", {"region": "minimal", "runner": "mrv1"}), ("nccl", {"check": "full"})],
    ids=str,
)
def test_others_run_once_a_call_outside_of_graphs(
    cuda: FakeCuda, calls: list[str], monkeypatch: pytest.MonkeyPatch, backend: str, options: dict[str, Any]
) -> None:
    """So do those of NCCL with a full check, which runs twice what is captured."""
    say(monkeypatch, backend)
    monkeypatch.setattr(CheckedReplay, "_compare", lambda *_: None)  # replays compute nothing here
    compiled = torch.compile(step, backend=dsv4_piecewise, dynamic=True, options=options)
    for _ in range(4):
        calls.clear()
        compiled(torch.arange(4.0))
        assert calls == once("run")
    assert cuda.replays >= 6
    assert cuda.findings == []


def test_a_capture_that_fails_behind_a_collective_runs_it_once(
    cuda: FakeCuda, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op behind it is found not to be capturable; the call goes on eagerly, and later ones have another plan."""
    say(monkeypatch, "nccl")

    def host_read(x: Tensor) -> Tensor:
        if cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x + 1

    library = torch.library.Library("collectives_test", "FRAGMENT")
    library.define("read(Tensor x) -> Tensor")
    library.impl("read", host_read, "CompositeExplicitAutograd")
    torch.library.register_fake("collectives_test::read", lambda x: torch.empty_like(x), lib=library)

    def reads(x: Tensor) -> Tensor:
        return torch.ops.collectives_test.read(fc.all_reduce(x * 2, "sum", dist.group.WORLD)) * 3

    compiled = torch.compile(reads, backend=dsv4_piecewise, dynamic=True)
    ran = []
    for _ in range(5):
        calls.clear()
        compiled(torch.arange(4.0))
        ran.append(sum(call == "all_reduce run" for call in calls))
    assert counters.replans == 1
    assert ran == [1, 1, 1, 0, 0]  # warm-up, refused capture, warm-up of the new plan, then replays
    del library
