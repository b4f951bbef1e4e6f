"""Two runners in step: one over a compiled stack of attention layers, one over an equal stack in eager."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from paging import tiny_config
from runner_helpers import make_prompts
from runtime_helpers import compile_host
from torch import Tensor, nn

from dsv4_compile.models.deepseek_v4 import AttentionStack, StepState
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2, StepResult

# The runner, and the options of the backend that go with it.
SETUPS = {
    "v1 wide": (ModelRunnerV1, {"runner": "mrv1", "region": "wide"}),
    "v1 minimal": (ModelRunnerV1, {"runner": "mrv1", "region": "minimal"}),
    "v2 narrow": (ModelRunnerV2, {"runner": "mrv2", "region": "narrow"}),
    "v2 minimal": (ModelRunnerV2, {"runner": "mrv2", "region": "minimal"}),
    "v1 copied in": (ModelRunnerV1, {"runner": "mrv2", "region": "narrow"}),
}
BUCKETS = (2, 4, 8, 16, 48)
# The indexer selects 7 blocks of 4 tokens: contexts above 28 are long.
CONFIG = tiny_config((0, 4, 128), index_topk=7)


class Kept(nn.Module):
    """Keeps what the model it wraps returned last, and the sizes of all calls."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.logits: Tensor | None = None
        self.sizes: list[int] = []

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        self.logits = self.model(input_ids, positions, step)
        self.sizes.append(len(input_ids))
        return self.logits


class Served:
    """A compiled and an eager models in runners of one kind, which are given the same requests.

    Args:
        setup: a key of `SETUPS`.
        dtype: of the weights and caches.
        compiler_options: more options of the backend.
        tolerance: how far logits and caches may be off, absolutely; 0 asks for the same bits.
        runner_options: as of `ModelRunner`.
    """

    def __init__(
        self,
        setup: str,
        dtype: torch.dtype = torch.float32,
        *,
        compiler_options: Mapping[str, Any] = MappingProxyType({}),
        tolerance: float = 0.0,
        **runner_options: Any,
    ) -> None:
        self.runner_type, options = SETUPS[setup]
        self.options = {**options, **compiler_options}
        self.tolerance = tolerance
        stacks = [AttentionStack(CONFIG, seed=3).to(dtype) for _ in range(2)]
        self.stack = stacks[0]
        self.compiled = compile_host(self.stack, **self.options)
        self._runner_options = {
            "max_num_reqs": 4,
            "max_num_batched_tokens": 48,
            "max_model_len": 400,
            "buckets": BUCKETS,
            **runner_options,
        }
        self.models = (Kept(self.compiled), Kept(stacks[1]))
        self.renew_runners()

    def renew_runners(self) -> None:
        """New runners, with new caches, on the same models."""
        self.runners = tuple(self.runner_type(model, CONFIG, **self._runner_options) for model in self.models)

    @property
    def runner(self) -> ModelRunner:
        """The one of the compiled model."""
        return self.runners[0]

    def add_request(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        for runner in self.runners:
            runner.add_request(prompt, max_new_tokens)

    def step(self) -> StepResult:
        """One step of both; the logits are equal within the tolerance, padding included, and so are the tokens."""
        result, wanted = (runner.step() for runner in self.runners)
        self._compare(*(model.logits for model in self.models), f"logits of call {self.models[0].sizes}")
        assert result == wanted
        return result

    def _compare(self, ours: Tensor, theirs: Tensor, what: str) -> None:
        tolerance = self.tolerance if ours.is_floating_point() else 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, equal_nan=True, msg=what)

    def finish(self) -> None:
        """Step until no request is left, and compare the caches."""
        while self.runner.num_active:
            self.step()
        self.compare_caches()

    def compare_caches(self) -> None:
        for (name, ours), theirs in zip(self.models[0].named_buffers(), self.models[1].buffers(), strict=True):
            self._compare(ours, theirs, name)

    def forget(self) -> None:
        """Let go of the last logits."""
        for model in self.models:
            model.logits = None

    def padding_inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, StepState]:
        """Arguments of a call that is padding alone."""
        inputs = self.runner.padding_inputs(num_tokens)
        return inputs.input_ids, inputs.positions, inputs.step


class Traffic:
    """Random requests: short and long prompts that join at random, so that batches are mixed."""

    def __init__(
        self, served: Served, seed: int = 0, lengths: Sequence[int] = (1, 2, 4, 5, 6, 9, 11, 13, 40, 75)
    ) -> None:
        self._served, self._lengths = served, lengths
        self._rng = random.Random(seed)

    def step(self) -> StepResult:
        """Perhaps let a request join, then step."""
        runner = self._served.runner
        if runner.num_active == 0 or (runner.num_active < 6 and self._rng.random() < 0.4):
            (prompt,) = make_prompts(self._rng.choice(self._lengths), seed=self._rng.randrange(1 << 30))
            self._served.add_request(prompt, self._rng.randrange(1, 10))
        seed = self._rng.randrange(1 << 30)
        for each in self._served.runners:
            each.blocks.shuffle(random.Random(seed))
        return self._served.step()
