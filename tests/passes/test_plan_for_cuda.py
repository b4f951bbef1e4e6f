"""What is planned for inputs on a CUDA device, on fake tensors: no device is needed to plan, and none is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_plans import CUDA, attention, on_cuda, planned
from torch import Tensor

from benchmarks.toy import Toy
from dsv4_compile.errors import FullGraphError, HazardError
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.ops import registry
from dsv4_compile.ops.kernels import scratch

toy = torch.ops.toy


def reasons(plan: Plan) -> dict[str, str | None]:
    return {op.name: op.reason for region in plan.regions for op in region.ops}


def test_the_device_is_that_of_the_inputs() -> None:
    with on_cuda():
        graph, plan = planned(Toy(2), torch.empty(4, 4))
    assert graph.traced.device == CUDA
    assert [unit.kind for unit in graph.units] == ["piece", "region", "piece", "region", "piece"]
    assert {slot.meta.device for slot in graph.slots} == {CUDA}
    assert set(reasons(plan).values()) == {"split op"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_attention_is_planned_as_on_a_cpu(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "KERNELS_SERVE", False)  # with Triton, kernels take scratch, and promise one graph
    plans = []
    for device in ("cpu", "cuda"):
        with on_cuda(device):
            stack, inputs = attention(ratio, device)
            graph, plan = planned(stack, *inputs, runner="mrv2", decode="piecewise", piece_compiler="eager")
        assert graph.traced.device.type == device
        plans.append(str(plan))
    assert plans[0] == plans[1]
    assert "host memory" not in plans[0]


# the whole step in uniform decode

SPLIT_OPS = ("dsv4::sparse_indexer", "dsv4::forward_mqa")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers the split ops of a layer as they are where Triton is installed, but for which calls kernels serve."""

    def register(why_torch: Callable[..., str | None]) -> None:
        promised = {
            name: replace(registry._registered[name], capturable=(("cuda", "decode"),), why_not_kept=why_torch)
            for name in SPLIT_OPS
        }
        monkeypatch.setattr(registry, "_registered", {**registry._registered, **promised})

    return register


def always(*_: Any, **__: Any) -> None:
    """A kernel serves every call."""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_decode_step_of_kernels_is_one_graph_on_cuda_alone(served: Callable[..., None], device: str) -> None:
    served(always)
    with on_cuda(device):
        stack, inputs = attention(4, device)
        graph, plan = planned(stack, *inputs, runner="mrv2", piece_compiler="eager")
    assert {op for op, reason in reasons(plan).items() if reason == "split op"} == {*SPLIT_OPS}
    assert graph.no_full is None
    if device == "cpu":
        assert graph.full is None
        return
    assert graph.full is not None
    (step,) = graph.full.units
    assert (step.kind, step.name) == ("piece", "whole_step")
    assert {f"dsv4::{node.target._opname}" for node in step.nodes if "dsv4" in str(node.target)} >= {*SPLIT_OPS}


def test_what_no_kernel_serves_keeps_the_step_in_pieces(served: Callable[..., None]) -> None:
    """The op is asked with what its call will be given: fakes on the device, numbers, and the words of formats."""
    asked: list[dict[Any, Any]] = []

    def why_torch(*arguments: Any, **named: Any) -> str:
        asked.append({**dict(enumerate(arguments)), **named})
        return "q is torch.float32"

    served(why_torch)
    with on_cuda():
        stack, inputs = attention(128, "cuda")
        graph, plan = planned(stack, *inputs, runner="mrv2")
        assert graph.full is None
        (note,) = [
            note for note in plan.notes if note.startswith("uniform decode runs in pieces: q is torch.float32 (")
        ]
        assert "in attend" in note
        torch._dynamo.reset()
        with pytest.raises(FullGraphError, match=r'decode="full", but .* graph: q is torch.float32 \(.*in attend'):
            planned(stack, *inputs, runner="mrv2", decode="full")
    given = asked[0]
    assert given[0].device == CUDA
    assert given[0].shape == (8, *given[0].shape[1:])
    assert not any(isinstance(size, torch.SymInt) for size in given[0].shape)
    assert (given[8], given[10], given[13]) == (None, 128, "auto")  # topk_indices, ratio, kv_cache_dtype


def test_the_whole_step_is_a_hazard_under_mrv1(served: Callable[..., None]) -> None:
    served(always)
    with on_cuda():
        stack, inputs = attention(0, "cuda")
        with pytest.raises(HazardError, match=r"reads the step state .*, but it would be captured under mrv1"):
            planned(stack, *inputs, runner="mrv1", region="wide", decode="full")


# the piece compiler


@pytest.mark.parametrize(
    ("device", "compiler", "compiled"),
    [
        ("cuda", "auto", True),
        ("cuda", "inductor", True),
        ("cuda", "eager", False),
        ("cpu", "auto", False),
        ("cpu", "inductor", True),
    ],
)
def test_pieces_are_cut_for_inductor_on_cuda(device: str, compiler: Any, compiled: bool) -> None:
    with on_cuda(device):
        graph, plan = planned(Toy(2), torch.empty(4, 4), piece_compiler=compiler)
    subgraphs = [subgraph for piece in graph.subgraphs.values() for subgraph in piece]
    assert bool(subgraphs) == compiled
    assert {subgraph.uncompiled for subgraph in subgraphs} <= {None}
    assert bool([subgraph for piece in plan.pieces for subgraph in piece.subgraphs]) == compiled


# side streams


def branches(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    result: Tensor = toy.fresh((h @ w).sin() + (h @ w.T).cos() + (h @ (w + 1)).tan())
    return result


@pytest.mark.parametrize(("asked", "used"), [({}, 0), ({"aux_streams": "auto"}, 0), ({"aux_streams": 0}, 0)])
def test_no_side_stream_unless_asked_for(asked: dict[str, Any], used: int) -> None:
    with on_cuda():
        graph, _ = planned(branches, torch.empty(8, 2048), torch.empty(2048, 2048), **asked)
    assert max(graph.streams.values(), default=0) == used


@pytest.mark.parametrize(("asked", "used"), [(2, 2), (3, 2)])
def test_side_streams_that_are_asked_for(asked: int, used: int) -> None:
    """Three products, one of which is on stream 0."""
    with on_cuda():
        graph, plan = planned(branches, torch.empty(8, 2048), torch.empty(2048, 2048), aux_streams=asked)
    assert max(graph.streams.values()) == used
    assert {op.stream for piece in plan.pieces for op in piece.ops} == set(range(used + 1))


def test_branches_of_a_layer_are_on_side_streams() -> None:
    with on_cuda():
        stack, inputs = attention(4, "cuda")
        graph, _ = planned(stack, *inputs, runner="mrv2", aux_streams=3)
    assert set(graph.streams.values()) == {1, 2, 3}


# memory that is elsewhere


def test_what_touches_host_memory_is_eager() -> None:
    def f(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = toy.fresh(x.sin())
        return y.cos(), y.cpu(), lengths * 2

    with on_cuda():
        graph, plan = planned(f, torch.empty(8, 4), torch.empty(3, device="cpu"))
    assert graph.traced.device == CUDA
    assert reasons(plan) == {
        "toy::fresh": "split op",
        "cpu": "touches cpu in host memory, the graph runs on cuda:0",
        "mul": "touches mul in host memory, the graph runs on cuda:0",
    }
    assert [op.op for piece in plan.pieces for op in piece.ops] == ["sin", "cos"]


def test_a_scalar_tensor_in_host_memory_is_no_reason_to_leave_its_device() -> None:
    """The scalar is read by the host when the kernel is launched, so its user is eager, and the rest is captured."""

    def f(x: Tensor, scale: Tensor) -> Tensor:
        result: Tensor = toy.fresh(x.sin() * scale).cos()
        return result

    scale = torch.ones(())  # a real one, whose value is part of the bucket
    with on_cuda():
        graph, plan = planned(f, torch.empty(8, 4), scale)
    assert graph.traced.device == CUDA
    assert reasons(plan)["mul"] == "touches l_scale_ in host memory, the graph runs on cuda:0"
    assert [op.op for piece in plan.pieces for op in piece.ops] == ["sin", "cos"]


def test_what_is_made_in_host_memory_and_moved_is_eager() -> None:
    def f(x: Tensor) -> Tensor:
        steps = torch.arange(4, device="cpu").to(x.device)
        result: Tensor = toy.fresh(x.sin() + steps).cos()
        return result

    with on_cuda():
        _, plan = planned(f, torch.empty(8, 4))
    found = reasons(plan)
    assert {"arange", "to"} <= found.keys()
    assert all("in host memory" in str(found[name]) for name in ("arange", "to"))


def test_two_devices_are_told_apart() -> None:
    def f(x: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        y = toy.fresh(x.sin())
        return y.cos(), (there * 2).to(x.device)

    with on_cuda():
        graph, plan = planned(f, torch.empty(8, 4), torch.empty(3, device="cuda:1"))
    assert graph.traced.device == CUDA
    found = reasons(plan)
    assert found["mul"] == "touches mul on cuda:1, the graph runs on cuda:0"
    assert found["to"] == "touches mul on cuda:1, the graph runs on cuda:0"
    assert [op.op for piece in plan.pieces for op in piece.ops] == ["sin", "cos"]


def test_the_second_device_may_be_the_one_of_the_graph() -> None:
    with on_cuda("cuda:1"):
        graph, plan = planned(Toy(1), torch.empty(4, 4))
    assert graph.traced.device == torch.device("cuda", 1)
    assert set(reasons(plan).values()) == {"split op"}
