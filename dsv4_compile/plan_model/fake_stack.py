"""The attention stack of a configuration, its caches and a step, on fake tensors: layouts without memory.

They are fakes of the CPU where nothing else is asked for. What is planned for a GPU is the same, but for two things:
the scratch that the split ops are handed there where Triton kernels serve them, which `memory` adds, and how pieces are
cut for a piece compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import mark_static, mark_static_address

from ..compat.dynamo import new_fake_mode
from ..config import Config
from ..graph.partitioned import PartitionedGraph
from ..inspect.explain import read_plan
from ..models.deepseek_v4 import AttentionStack, CacheGroup, DeepseekV4Config, StepState, allocate_caches, bind_caches
from ..runners.batch import REQUEST_FIELDS

Answer = TypeVar("Answer")

TRACED_TOKENS = 8  # any number that is no other size of the model; the plan has a symbol in its place
BLOCKS = 11  # of each cache, and columns of the block tables: no plan depends on it
_INT64 = ("input_ids", "positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStack:
    """A stack as fakes, and what it would take.

    Attributes:
        model: the stack, with caches.
        parameters: how many.
        buffers: bytes of its buffers, caches apart.
        args: of a call.
    """

    model: AttentionStack
    parameters: int
    buffers: int
    args: tuple[Tensor, Tensor, StepState]


def read_stack(
    config: DeepseekV4Config,
    dtype: torch.dtype,
    requests: int,
    options: Config,
    read: Callable[[FakeStack, PartitionedGraph], Answer],
    device: str = "cpu",
) -> Answer:
    """Plan the stack of a configuration, and say something of it.

    Args:
        config: the sizes.
        dtype: of weights, activations and plain caches.
        requests: rows of the step state.
        options: of the backend; under mrv2 the step is in buffers that stay in place.
        read: takes the stack and its plan, while the trace goes on: tensors that it makes are fakes.
        device: of the fakes; it need not be there.

    Raises:
        Dsv4Error: what compiling would raise, such as a HazardError.
    """
    with _fakes(device):
        stack = _make_stack(config, dtype, requests, persistent=options.resolved_runner == "mrv2")
        return read_plan(stack.model, stack.args, {}, options, lambda graph, _: read(stack, graph))


@contextmanager
def _fakes(device: str) -> Iterator[None]:
    with new_fake_mode(), torch.no_grad(), torch.device(device):
        yield


def _make_stack(config: DeepseekV4Config, dtype: torch.dtype, requests: int, *, persistent: bool) -> FakeStack:
    with torch.device("meta"):  # weights are drawn there too, and a device that is not there could not
        model = AttentionStack(config)
    for module in model.modules():  # `Module.to` does not know fake tensors
        for name, weight in list(module.named_parameters(recurse=False)):
            module._parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=dtype), requires_grad=False)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    parameters = sum(weight.numel() for weight in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    blocks: dict[CacheGroup, int] = dict.fromkeys(("swa", "compressed", "c4_state", "c128_state"), BLOCKS)
    bind_caches(model, allocate_caches(config, blocks, dtype=dtype, device=model.embedding.weight.device))
    args = _step(requests, persistent=persistent)
    return FakeStack(model=model, parameters=parameters, buffers=buffers, args=args)


def _step(requests: int, *, persistent: bool) -> tuple[Tensor, Tensor, StepState]:
    """As the runners make it: only the token count changes from step to step."""
    per_token = {name: torch.zeros(TRACED_TOKENS, dtype=torch.int64) for name in _INT64}
    state = {field.name: _field(field.name, requests) for field in fields(StepState)}
    for name in REQUEST_FIELDS:
        mark_static(state[name])
    if persistent:
        for tensor in (*per_token.values(), *state.values()):
            mark_static_address(tensor)
    return per_token["input_ids"], per_token["positions"], StepState(**state)


def _field(name: str, requests: int) -> Tensor:
    if name.endswith("slot_mapping"):
        return torch.zeros(TRACED_TOKENS, dtype=torch.int64)
    if name.endswith("block_table"):
        return torch.zeros(requests, BLOCKS, dtype=torch.int32)
    lengths = {"token_to_req": TRACED_TOKENS, "query_start_loc": requests + 1, "seq_lens": requests}
    return torch.zeros(lengths[name], dtype=torch.int32)
