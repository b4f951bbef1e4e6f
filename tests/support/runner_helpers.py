"""What the tests of the runners share: small runners, prompts, and a model that records its calls."""

from __future__ import annotations

import random
from collections.abc import Callable

from paging import tiny_config
from torch import Tensor, nn

from dsv4_compile.models.deepseek_v4 import StepState
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2

RUNNERS = (ModelRunnerV1, ModelRunnerV2)
VOCAB = tiny_config().vocab_size


def make_runner(model: nn.Module, runner: type[ModelRunner] = ModelRunnerV1, **options: object) -> ModelRunner:
    defaults = {"max_num_reqs": 3, "max_num_batched_tokens": 48, "max_model_len": 400}
    return runner(model, model.config, **{**defaults, **options})


def make_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def finish(runner: ModelRunner) -> dict[int, list[int]]:
    finished: dict[int, list[int]] = {}
    while runner.num_active:
        finished.update(runner.step().finished)
    return finished


def assert_all_blocks_free(runner: ModelRunner) -> None:
    for group, total in runner.blocks.num_blocks.items():
        assert runner.blocks.free_blocks(group) == total


class Recorder(nn.Module):
    """Keeps the logits and the inputs of every call of the model it wraps; `before` may break a call."""

    def __init__(self, model: nn.Module, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.model, self.config, self.before = model, model.config, before
        self.logits: list[Tensor] = []
        self.inputs: list[tuple[Tensor, Tensor, StepState]] = []

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        self.before()
        self.inputs.append((input_ids, positions, step))
        self.logits.append(self.model(input_ids, positions, step))
        return self.logits[-1]


def one_prefill(model: nn.Module, tokens: list[int]) -> Tensor:
    """Logits [len(tokens), vocab] of a single step over all tokens."""
    recorder = Recorder(model)
    runner = make_runner(recorder, max_num_batched_tokens=512, max_model_len=512)
    runner.add_request(tokens, 1)
    runner.step()
    return recorder.logits[0]
