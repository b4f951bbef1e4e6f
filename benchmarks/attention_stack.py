"""A stack of tiny attention layers with a batch of two requests, for benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

import dsv4_compile
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.models.deepseek_v4 import (
    AttentionStack,
    CacheGroup,
    DeepseekV4Config,
    StepState,
    allocate_caches,
    bind_caches,
)

REQUESTS, BLOCKS = 2, 32


def stack_and_inputs(
    layers: int, tokens: int = 8, device: str = "cpu"
) -> tuple[AttentionStack, tuple[Tensor, Tensor, StepState]]:
    """A stack with the layer pattern of the released Pro model and the first step of one request."""
    return stack_of(pattern(layers), tokens, device)


def pattern(layers: int) -> tuple[int, ...]:
    """Compress ratios: two C128A layers, then C4A and C128A in turn."""
    return tuple([128, 128, *([4, 128] * layers)][:layers])


def stack_of(
    ratios: Sequence[int], tokens: int, device: str = "cpu"
) -> tuple[AttentionStack, tuple[Tensor, Tensor, StepState]]:
    """A stack with a tiny layer for each compress ratio (0 is SWA), its caches, and the first step of one request."""
    return stack_with(tiny_config(ratios), tokens, device)


def stack_with(
    config: DeepseekV4Config, tokens: int, device: str = "cpu"
) -> tuple[AttentionStack, tuple[Tensor, Tensor, StepState]]:
    """A stack of a configuration, its caches, and the first step of one request, of at most 128 tokens."""
    stack = AttentionStack(config).to(device)
    blocks: dict[CacheGroup, int] = {"swa": BLOCKS, "compressed": BLOCKS, "c4_state": BLOCKS, "c128_state": BLOCKS}
    bind_caches(stack, allocate_caches(config, blocks, device=torch.device(device)))
    with torch.device(device):
        return stack, (torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), first_step(tokens))


def tiny_config(ratios: Sequence[int]) -> DeepseekV4Config:
    """Small sizes; one layer for each ratio. 64 indexer heads, so that scores do not tie."""
    return DeepseekV4Config.tiny(ratios, index_n_heads=64)


@cache
def plan_of(ratios: tuple[int, ...], tokens: int, runner: str, region: str) -> Plan:
    """The plan of a stack; kept, since tracing many layers takes long and several benchmarks read it.

    Raises:
        HazardError: the region is too narrow for the runner.
    """
    stack, inputs = stack_of(ratios, tokens)
    return dsv4_compile.explain(stack, *inputs, options={"runner": runner, "region": region})


def first_step(tokens: int) -> StepState:
    """The step state of one request's first tokens, whose blocks are numbered in order."""
    table = torch.full((REQUESTS, BLOCKS), -1, dtype=torch.int32)
    table[0] = torch.arange(BLOCKS)
    slots = torch.arange(tokens)
    step = StepState(
        token_to_req=torch.zeros(tokens, dtype=torch.int32),
        query_start_loc=torch.tensor([0, tokens, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens, 0], dtype=torch.int32),
        swa_slot_mapping=slots,
        swa_block_table=table,
        block_table=table.clone(),
        c4_slot_mapping=torch.where((slots + 1) % 4 == 0, slots // 4, -1),
        c128_slot_mapping=torch.full((tokens,), -1),
        c4_state_slot_mapping=slots,
        c4_state_block_table=table.clone(),
        c128_state_slot_mapping=slots.clone(),
        c128_state_block_table=table.clone(),
    )
    return mark_request_dims(step)


def mark_request_dims(step: StepState) -> StepState:
    """What a runner does: from step to step only the token dim changes."""
    for field in dataclasses.fields(step):
        if field.name.endswith("table") or field.name in ("query_start_loc", "seq_lens"):
            torch._dynamo.mark_static(getattr(step, field.name))
    return step
