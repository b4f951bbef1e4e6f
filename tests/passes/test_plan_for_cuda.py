"""What is planned for inputs on a CUDA device, on fake tensors: no device is needed to plan, and none is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
import torch
from stages import stages_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_ops import SPLIT

from benchmarks.attention_stack import first_step, mark_request_dims, tiny_config
from benchmarks.toy import SPLIT_OP, Toy
from dsv4_compile.graph.partitioned import PartitionedGraph
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.models.deepseek_v4 import AttentionStack, StepState, allocate_caches, bind_caches

toy = torch.ops.toy
CUDA = torch.device("cuda", 0)
STEP = first_step(8)


@contextmanager
def on_cuda(device: str = "cuda:0") -> Iterator[None]:
    """Tensors that are made in the block are on a device that is not there."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.device(device):
        yield


def planned(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[PartitionedGraph, Plan]:
    _, graph, plan = stages_of(fn, *args, split_ops=(*SPLIT, SPLIT_OP), **options)
    return graph, plan


def attention(ratio: int, device: str) -> tuple[AttentionStack, tuple[Tensor, Tensor, StepState]]:
    """A layer that was made on a device, its caches, and the first step of one request."""
    config = tiny_config((ratio,))
    with torch.device("meta"):
        stack = AttentionStack(config)
    for module in stack.modules():  # `Module.to` does not know fake tensors
        for name, weight in list(module.named_parameters(recurse=False)):
            module._parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), requires_grad=False)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    blocks: dict[Any, int] = dict.fromkeys(("swa", "compressed", "c4_state", "c128_state"), 8)
    bind_caches(stack, allocate_caches(config, blocks, device=torch.device(device)))
    state = {field.name: getattr(STEP, field.name) for field in fields(STEP)}
    step = StepState(**{name: torch.empty(value.shape, dtype=value.dtype) for name, value in state.items()})
    return stack, (torch.zeros(8, dtype=torch.long), torch.arange(8), mark_request_dims(step))


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
def test_attention_is_planned_as_on_a_cpu(ratio: int) -> None:
    plans = []
    for device in ("cpu", "cuda"):
        with on_cuda(device):
            stack, inputs = attention(ratio, device)
            graph, plan = planned(stack, *inputs, runner="mrv2", piece_compiler="eager")
        assert graph.traced.device.type == device
        plans.append(str(plan))
    assert plans[0] == plans[1]
    assert "host memory" not in plans[0]


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
