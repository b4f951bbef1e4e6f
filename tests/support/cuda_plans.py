"""Plans for CUDA devices that are not there, on fake tensors: no device is needed to plan, and none is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from stages import stages_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_ops import SPLIT

from benchmarks.attention_stack import first_step, mark_request_dims, tiny_config
from benchmarks.toy import SPLIT_OP
from dsv4_compile.graph.partitioned import PartitionedGraph
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.models.deepseek_v4 import (
    AttentionStack,
    DeepseekV4Config,
    StepState,
    allocate_caches,
    bind_caches,
)

CUDA = torch.device("cuda", 0)
STEP = first_step(8)


@contextmanager
def on_cuda(device: str = "cuda:0") -> Iterator[None]:
    """Tensors that are made in the block are on a device that is not there."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), torch.device(device):
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def planned(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[PartitionedGraph, Plan]:
    _, graph, plan = stages_of(fn, *args, split_ops=(*SPLIT, SPLIT_OP), **options)
    return graph, plan


def attention(
    ratio: int,
    device: str,
    *,
    config: DeepseekV4Config | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[AttentionStack, tuple[Tensor, Tensor, StepState]]:
    """A layer that was made on a device, its caches, and the first step of one request."""
    config = config or tiny_config((ratio,))
    with torch.device("meta"), default_dtype(dtype):
        stack = AttentionStack(config)
    for module in stack.modules():  # `Module.to` does not know fake tensors
        for name, weight in list(module.named_parameters(recurse=False)):
            module._parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), requires_grad=False)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    blocks: dict[Any, int] = dict.fromkeys(("swa", "compressed", "c4_state", "c128_state"), 8)
    bind_caches(stack, allocate_caches(config, blocks, dtype=dtype, device=torch.device(device)))
    state = {field.name: getattr(STEP, field.name) for field in fields(STEP)}
    step = StepState(**{name: torch.empty(value.shape, dtype=value.dtype) for name, value in state.items()})
    return stack, (torch.zeros(8, dtype=torch.long), torch.arange(8), mark_request_dims(step))
