"""S6: time to the first token: one prefill of the Flash model's first layers through the runners, by region.

From a request's arrival to its token on the host. All rows of a runner make their step state in the same way, so what
they differ in is the region alone: `mrv2` has eager and all three; `mrv1`, which makes new tensors in every step, eager
and the two that it allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dsv4_compile.models.deepseek_v4 import DeepseekV4Config
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2

from ..bench import Bench
from ..hole import light_ops
from ..models import FLASH_RATIOS, compiled, config_of, draw_stack, inductor_of, many_recompiles
from ..timing import Step, host_us, measure

RUNNERS: dict[str, type[ModelRunner]] = {"mrv2": ModelRunnerV2, "mrv1": ModelRunnerV1}
ROWS = {"mrv2": ("eager", "wide", "minimal", "narrow"), "mrv1": ("eager", "wide", "minimal")}
PROMPTS, DRY_PROMPTS = (512, 128, 2048), (16,)  # the one of the headline first


def run(bench: Bench) -> None:
    """Both runners, then what it takes to bring step state to the device."""
    prompts = bench.pick(PROMPTS, DRY_PROMPTS)
    config = config_of(bench, bench.pick(FLASH_RATIOS, (0,)), max_tokens=max(prompts))
    share = bench.remaining() / (len(ROWS) * len(prompts) + 2)
    with light_ops(bench.device), many_recompiles():
        runners = {kind: _runners(bench, config, kind, prompts) for kind in ROWS}
        for tokens in prompts:
            for kind, made in runners.items():
                _compare(bench, made, tokens, share / 2, kind)
    with bench.attempt(what="step state"):
        _step_state(bench, {kind: made["eager"] for kind, made in runners.items() if "eager" in made}, min(prompts))


def _runners(bench: Bench, config: DeepseekV4Config, kind: str, prompts: tuple[int, ...]) -> dict[str, ModelRunner]:
    """A runner with a model of its own for each region; all models are equal."""
    made = {}
    for region in ROWS[kind]:
        with bench.attempt(config=region, runner=kind):
            model = draw_stack(bench, config)
            call: Callable[..., Any] = model
            if region != "eager":
                call = compiled(model, runner=kind, region=region, piece_compiler=inductor_of(bench))
            made[region] = RUNNERS[kind](
                call,
                config,
                max_num_reqs=2,
                max_num_batched_tokens=max(prompts),
                max_model_len=max(prompts) + 8,
                buckets=prompts,
                attention=model,
            )
    return made


def _compare(bench: Bench, runners: dict[str, ModelRunner], tokens: int, seconds: float, kind: str) -> None:
    case: dict[str, Any] = {"tokens": tokens, "runner": kind, "hole": "stand-in"}
    steps: dict[str, Step] = {}
    expected: int | None = None
    for region, runner in runners.items():
        with bench.attempt(config=region, **case):
            step = partial(first_token, runner, tokens)
            token = [step() for _ in range(3)][-1]
            expected = token if expected is None else expected
            # in bf16 two logits may be equal but for rounding, so another token is worth a look and no error
            bench.row("first_token", token, n=3, ok=True if token == expected else None, config=region, **case)
            steps[region] = step
    measure(bench, steps, seconds, **case)


@torch.no_grad()
def first_token(runner: ModelRunner, tokens: int) -> int:
    """Let a request arrive, run its prefill, return its only token."""
    vocab = runner.limits.config.vocab_size
    request = runner.add_request([(token * 7) % vocab for token in range(tokens)], max_new_tokens=1)
    (token,) = runner.step().new_tokens[request]
    return token


def _step_state(bench: Bench, runners: dict[str, ModelRunner], tokens: int) -> None:
    """New tensors for every step beside one packed copy."""
    names = {"mrv1": "new tensors (mrv1)", "mrv2": "one packed copy (mrv2)"}
    steps: dict[str, Step] = {names[kind]: partial(made.padding_inputs, tokens) for kind, made in runners.items()}
    host_us(bench, steps, "inputs", tokens=tokens)
