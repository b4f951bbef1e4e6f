"""What the smaller examples compile: a tiny attention layer with its caches, and the first step of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4_compile.models.deepseek_v4 import AttentionStack, DeepseekV4Attention, DeepseekV4Config, StepState
from dsv4_compile.runners import ModelRunnerV2

Model = Callable[[Tensor, Tensor, StepState], Tensor]
MAX_TOKENS = 64


def make_runner(model: Model, stack: AttentionStack, buckets: Sequence[int] | None = None) -> ModelRunnerV2:
    """A runner for a model (compiled or not) around the stack's layers; it puts its caches on them."""
    return ModelRunnerV2(
        model,
        stack.config,
        max_num_reqs=2,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=256,
        buckets=buckets,
        attention=stack,
    )


def layer_and_inputs(num_tokens: int) -> tuple[DeepseekV4Attention, tuple[Tensor, Tensor, StepState]]:
    """A C4A layer, and (hidden states [T, 32], positions [T], step) of the first step of one request."""
    stack = AttentionStack(DeepseekV4Config.tiny([4], max_num_batched_tokens=MAX_TOKENS))
    steps: list[tuple[Tensor, StepState]] = []

    def record(input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        steps.append((positions, step))
        return torch.zeros(len(input_ids), 1)

    runner = make_runner(record, stack)
    runner.add_request([0] * num_tokens, max_new_tokens=1)
    runner.step()
    hidden_states = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(0))
    attention = stack.layers[0].attention
    assert isinstance(attention, DeepseekV4Attention)
    return attention, (hidden_states, *steps[0])
