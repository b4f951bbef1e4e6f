"""Plans of the attention layer and of a stack, for the snapshot tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from paging import Paging, tiny_config

import dsv4_compile
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.models.deepseek_v4 import AttentionStack, DeepseekV4Attention, StepState, bind_caches

POLICIES = {"narrow": ("mrv2", "narrow"), "wide": ("mrv1", "wide"), "minimal": ("mrv1", "minimal")}


def mark_request_dims(step: StepState) -> StepState:
    """What a runner does: only the token dim changes from step to step."""
    for field in dataclasses.fields(step):
        if field.name.endswith("table") or field.name in ("query_start_loc", "seq_lens"):
            torch._dynamo.mark_static(getattr(step, field.name))
    return step


def layer_plan(ratio: int, policy: str, **more: Any) -> Plan:
    """The plan of one layer with more options; ratio 0 is SWA, 4 C4A, 128 C128A."""
    runner, region = POLICIES[policy]
    config = tiny_config((ratio,))
    paging = Paging(config, [40, 40], max_reqs=3)
    layer = DeepseekV4Attention(config, 0)
    layer.bind(paging.caches()[0])
    positions, step = paging.step([(0, 0, 5), (1, 0, 8)])
    hidden = torch.zeros(13, config.hidden_size)
    options = {"runner": runner, "region": region, **more}
    return dsv4_compile.explain(layer, hidden, positions, mark_request_dims(step), options=options)


def stack_plan(policy: str, ratios: tuple[int, ...] = (0, 4, 128)) -> Plan:
    """The plan of embedding, layers and head."""
    runner, region = POLICIES[policy]
    config = tiny_config(ratios)
    paging = Paging(config, [40, 40], max_reqs=3)
    stack = AttentionStack(config)
    bind_caches(stack, paging.caches())
    positions, step = paging.step([(0, 0, 5), (1, 0, 8)])
    ids = torch.zeros(13, dtype=torch.long)
    options = {"runner": runner, "region": region}
    return dsv4_compile.explain(stack, ids, positions, mark_request_dims(step), options=options)


def units_text(plan: Plan) -> str:
    """The report without its list of inputs."""
    return str(plan).partition("\n\ninputs\n")[0]
