"""Side streams against one stream: captured steps of C4A layers, whose pieces have three independent branches.

Only a GPU runs streams side by side. On the CPU the host engine runs them one after another, so there is nothing to
gain, and this benchmark is part of `device_check` alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from dsv4_compile.models.deepseek_v4 import AttentionStack, DeepseekV4Config

from .attention_stack import first_step, stack_with, tiny_config
from .region import one_step
from .sections import Section, Setting, Table
from .settled import launches_of_a_replay, measure_settled

STREAMS = (0, 1, 3)
LAYERS = 4
TOKENS = (8, 32, 128)
INTRO = """
A captured step through {layers} C4A layers of {width} hidden dims, by tokens and side streams, pieces {compiled}.
Ratios are to no side stream, with as many tokens.
"""


def layers_of(setting: Setting) -> DeepseekV4Config:
    """Layers as those of the released Flash model on a GPU, tiny ones elsewhere."""
    ratios = (4,) * (1 if setting.quick else LAYERS)
    if setting.device == "cpu":
        return tiny_config(ratios)
    return DeepseekV4Config.flash(
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        max_position_embeddings=4096,
        vocab_size=1024,
        max_num_batched_tokens=max(TOKENS),
    )


def steps(model: AttentionStack, tokens: int, device: str) -> dict[str, Callable[[], object]]:
    """A captured step for each number of side streams, every one on a copy of the model."""
    found: dict[str, Callable[[], object]] = {}
    for streams in STREAMS:
        with torch.device(device):
            inputs = torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), first_step(tokens)
        options: dict[str, Any] = {"runner": "mrv2", "aux_streams": streams}
        compiled = torch.compile(copy.deepcopy(model), backend="dsv4_piecewise", dynamic=True, options=options)
        found[str(streams)] = one_step(compiled, inputs, renews=False)
        launches_of_a_replay(found[str(streams)])
    return found


def run(setting: Setting) -> Section:
    """Time every number of tokens and of side streams."""
    config, rows = layers_of(setting), []
    model, _ = stack_with(config, max(TOKENS), setting.device)  # once: its weights are drawn on the CPU, for seconds
    for tokens in TOKENS[:1] if setting.quick else TOKENS:
        torch._dynamo.reset()
        medians = measure_settled(steps(model, tokens, setting.device), 0.05 if setting.quick else 1.0, setting.device)
        rows += [
            (str(tokens), streams, f"{seconds * 1e3:.3f}", f"{seconds / medians['0']:.2f}")
            for streams, seconds in medians.items()
        ]
    compiled = "compiled by Inductor" if setting.device == "cuda" else "not compiled"
    intro = INTRO.format(layers=config.num_hidden_layers, width=config.hidden_size, compiled=compiled)
    return Section(
        title="Side streams", parts=(intro, Table(("tokens", "side streams", "ms a step", "of none"), tuple(rows)))
    )
