"""Which collectives a graph holds: on fake tensors of a CUDA device, with groups that say they are NCCL's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import stages_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_compile.analysis import effects
from dsv4_compile.graph.collective_call import CollectiveCall, callee
from dsv4_compile.inspect.plan import Plan

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

if dist.is_available():
    import torch.distributed._functional_collectives as fc
    from processes import free_port, gloo_group


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with gloo_group(0, 1, free_port()):
        yield


def reduces(x: Tensor) -> Tensor:
    return fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def gathers_two(x: Tensor) -> Tensor:
    one, other = fc.all_reduce_coalesced([x * 2, x + 1], "sum", dist.group.WORLD)
    return fc.all_gather_tensor(one, 0, dist.group.WORLD) + other.sum(0)


def reduces_in_place(x: Tensor) -> Tensor:
    y = x * 2
    torch.ops._c10d_functional.all_reduce_(y, "sum", dist.group.WORLD.group_name)
    other = x @ x
    torch.ops._c10d_functional.wait_tensor(y)
    return y + other


def waits_for_one_of_outside(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x) * 2


def reasons(plan: Plan) -> dict[str, str | None]:
    return {op.name: op.reason for region in plan.regions for op in region.ops}


@contextmanager
def fakes_on(device: str) -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.device(device):
        yield


def planned(monkeypatch: pytest.MonkeyPatch, function: Any, backend: str | None, device: str, **options: Any) -> Plan:
    monkeypatch.setattr(effects, "backend_of", lambda group, device: backend if group is not None else None)
    with fakes_on(device):
        _, graph, plan = stages_of(function, torch.ones(4, 4), **options)
    calls = [node for node in graph.traced.gm.graph.nodes if "c10d" in str(node.target)]
    assert calls
    assert all(isinstance(callee(node), CollectiveCall) for node in calls)
    return plan


@pytest.mark.parametrize("function", [reduces, gathers_two, reduces_in_place])
def test_those_of_nccl_are_captured(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, function, "nccl", "cuda")
    assert reasons(plan) == {}
    assert len(plan.pieces) == 1


@pytest.mark.parametrize("backend", ["gloo", "ucc", None])
def test_those_of_others_run_outside_of_graphs(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, reduces, backend, "cuda")
    assert set(reasons(plan).values()) == {"a collective runs outside of graphs here"}
    assert len(plan.pieces) == 2


def test_none_is_captured_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(reasons(planned(monkeypatch, reduces, "nccl", "cpu")).values()) == {"a collective runs on the host here"}


def test_one_that_was_started_elsewhere_is_waited_for_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, waits_for_one_of_outside, "nccl", "cuda")
    assert set(reasons(plan).values()) == {"a collective runs outside of graphs here"}


@pytest.mark.parametrize("function", [reduces, gathers_two, reduces_in_place])
def test_a_full_check_repeats_none(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, function, "nccl", "cuda", check="full")
    assert set(reasons(plan).values()) == {
        'a collective runs once a call, and check="full" runs what is captured twice'
    }


def test_a_wait_is_where_its_collective_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch, reduces, "nccl", "cuda", split_ops=("_c10d_functional::all_reduce",))
    assert {op.op: op.reason for unit in plan.regions for op in unit.ops} == {
        "_c10d_functional::all_reduce": "split op",
        "_c10d_functional::wait_tensor": "split op",
    }


def test_a_piece_compiler_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "backend_of", lambda group, device: "nccl")
    with fakes_on("cuda"):
        _, graph, _ = stages_of(reduces, torch.ones(4, 4), piece_compiler="aot_eager", aux_streams=2)
    (subgraphs,) = graph.subgraphs.values()
    assert [subgraph.uncompiled for subgraph in subgraphs] == [
        None,
        "calls _c10d_functional::all_reduce",
        None,
    ]
