"""One attention layer of transformers and ours with the same weights, and what serving tests share."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM

from dsv4_compile.integrations.transformers import SwappedModel
from dsv4_compile.models.deepseek_v4 import StepState
from dsv4_compile.runners import ModelRunnerV1, ModelRunnerV2

RUNNERS = (ModelRunnerV1, ModelRunnerV2)


LIMITS = {"max_num_reqs": 3, "max_num_batched_tokens": 300, "max_model_len": 400}


def make_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(128) for _ in range(length)] for length in lengths]


class Probe(nn.Module):
    """Runs a layer on rows of `hidden` picked by position, and keeps what came out by position."""

    def __init__(self, run: Any, hidden: Tensor, layer: nn.Module) -> None:
        super().__init__()
        self.run, self.hidden, self.layer = run, hidden, layer
        self.out = torch.full_like(hidden, torch.nan)

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        self.out[positions] = self.run(self.hidden[positions], positions, step)
        return torch.zeros(len(input_ids), 1)


def our_layer(swapped: SwappedModel, hidden: Tensor, chunk: int) -> Tensor:
    """[S, hidden] of the first attention layer, prefilled in chunks."""
    layer = swapped.language_model.model.layers[0].self_attn.attention
    probe = Probe(layer, hidden, layer)
    runner = ModelRunnerV1(probe, swapped.config, **{**LIMITS, "max_num_batched_tokens": chunk})
    runner.generate([[0] * len(hidden)], 1)
    return probe.out


def hf_layer(model: DeepseekV4ForCausalLM, hidden: Tensor, cache: object = None) -> Tensor:
    """The same of transformers; without a mask of full batch dimension it would drop causality over blocks."""
    attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    p = torch.arange(len(hidden))
    visible = (p <= p.unsqueeze(1)) & (p > p.unsqueeze(1) - model.config.sliding_window)
    mask = torch.zeros(1, 1, len(p), len(p)).masked_fill(~visible, float("-inf")).to(hidden.dtype)
    embeddings = {kind: rotary(hidden, position_ids=p.unsqueeze(0), layer_type=kind) for kind in ("main", "compress")}
    with torch.no_grad():
        out = attention(hidden[None], embeddings, p[None], mask, cache)[0]  # its last argument has had two names
    return out[0]
