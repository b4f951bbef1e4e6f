"""Time to the first token of a short prompt: one prefill step of the serving example's model, by configuration.

The model is a small random DeepSeek V4 of transformers with our attention, served by our runners; a time runs from a
request's arrival to its sampled token on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsv4_compile.integrations.transformers import swap_attention
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2

from .sections import Section, Setting, Table
from .settled import launches_of_a_replay, measure_settled

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from _serving import random_model

RUNNERS: dict[str, type[ModelRunner]] = {"mrv1": ModelRunnerV1, "mrv2": ModelRunnerV2}
CONFIGURATIONS = (("mrv1", "wide"), ("mrv1", "minimal"), ("mrv2", "narrow"))
PROMPT, BUCKET = 12, 16
INTRO = """
From a request of {prompt} tokens to its first token: one prefill step, padded to {bucket} tokens, of the serving
example's model (a DeepSeek V4 of transformers with {layers} small layers and our attention), the runner's own work
included. Every configuration gives the same token. On a CPU the host engine replays kernels one by one, so capture
saves little there; what it leaves to launch by hand is the same on a GPU.
"""


def first_token(runner: ModelRunner) -> int:
    """Let a request arrive, run its prefill, return its only token."""
    request = runner.add_request(list(range(PROMPT)), max_new_tokens=1)
    (token,) = runner.step().new_tokens[request]
    return token


def make_runner(layers: int, device: str, runner: str, options: dict[str, Any] | None) -> ModelRunner:
    """A runner for a model of its own with the same weights as all others; compiled if there are options."""
    original = random_model(layers).eval().to(device)
    original.set_experts_implementation("batched_mm")  # the other ones read the routing back to the host
    model = swap_attention(original, max_position_embeddings=64, max_num_batched_tokens=BUCKET)
    call: nn.Module | Callable[..., Any] = model
    if options is not None:
        call = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)
    return RUNNERS[runner](
        call,
        model.config,
        max_num_reqs=2,
        max_num_batched_tokens=BUCKET,
        max_model_len=64,
        buckets=(BUCKET,),
        attention=model,
    )


def steps(layers: int, device: str) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """What is timed, and the launches by hand in a captured step."""
    eager = make_runner(layers, device, "mrv1", None)
    expected = first_token(eager)
    rows: dict[str, Callable[[], object]] = {"eager": partial(first_token, eager)}
    counted: dict[str, int] = {}
    for name, region in CONFIGURATIONS:
        runner = make_runner(layers, device, name, {"runner": name, "region": region})
        step = partial(first_token, runner)
        counted[f"{name} {region}"] = launches_of_a_replay(step)
        token = step()
        assert token == expected, f"{name} {region}: token {token}, not {expected}"
        rows[f"{name} {region}"] = step
    return rows, counted


def run(setting: Setting) -> Section:
    """Measure the four configurations."""
    layers, seconds = (3, 0.05) if setting.quick else (4, 2.0)
    rows, counted = steps(layers, setting.device)
    medians = measure_settled(rows, seconds, setting.device)
    lines = tuple(
        (name, f"{s * 1e3:.2f}", f"{s / medians['eager']:.2f}", str(counted.get(name, "all")))
        for name, s in medians.items()
    )
    table = Table(("", "ms to the first token", "of eager", "launches by hand"), lines)
    intro = INTRO.format(prompt=PROMPT, bucket=BUCKET, layers=layers)
    return Section(title="Time to first token", parts=(intro, table))
