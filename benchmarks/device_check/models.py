"""Stacks of attention layers with the dims of the released models, drawn where they live, and steps for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dsv4_compile.models.deepseek_v4 import (
    AttentionStack,
    DeepseekV4Config,
    StepState,
    allocate_caches,
    bind_caches,
    stack,
)
from dsv4_compile.runners.batch import BatchBuilder, block_groups
from dsv4_compile.runners.block_allocator import BlockAllocator
from dsv4_compile.runners.limits import RunnerLimits
from dsv4_compile.runners.requests import Request
from dsv4_compile.runners.scheduler import Chunk

from ..attention_stack import mark_request_dims
from .bench import Bench

Inputs = tuple[Tensor, Tensor, StepState]
FLASH_RATIOS = (0, 0, 4, 128, 4, 128, 4, 128)  # how the Flash model begins
MOST_RECOMPILES = 64  # all rows of a process compile the same code; Dynamo would stop at eight, without a word


def config_of(
    bench: Bench, ratios: Sequence[int], *, dims: str = "flash", max_tokens: int = 256, max_len: int = 2304
) -> DeepseekV4Config:
    """Dims of a released model; of no model in a dry run."""
    sizes = {"max_num_batched_tokens": max_tokens, "max_position_embeddings": max_len, "vocab_size": 1024}
    if bench.dry:
        return DeepseekV4Config.tiny(ratios, index_n_heads=64)
    made = DeepseekV4Config.flash if dims == "flash" else DeepseekV4Config.pro
    return made(num_hidden_layers=len(ratios), compress_ratios=tuple(ratios), **sizes)


def draw_stack(bench: Bench, config: DeepseekV4Config, dtype: torch.dtype | None = None) -> AttentionStack:
    """A model whose weights are drawn on the device, where that takes no time; without caches."""
    with patch.object(stack, "randomise_", _draw), torch.device(bench.device):
        made = AttentionStack(config)
    return made.to(dtype or bench.pick(torch.bfloat16, torch.float32)).eval()


@torch.no_grad()
def _draw(module: nn.Module, *, seed: int = 0) -> None:
    """As `stack.randomise_`, on the device of the module."""
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        drawn = torch.randn_like(parameter)
        if name.endswith(("norm", "norm.weight")):
            drawn = 1 + 0.1 * drawn
        elif name.endswith("weight") and "embedding" not in name:
            drawn = drawn * parameter.shape[-1] ** -0.5
        parameter.copy_(drawn)


class Batches:
    """Makes steps of a model, and binds caches for them to it.

    Args:
        model: of the steps.
        requests: rows of the request dim, at least 2.
        max_len: tokens of a request at most.
    """

    def __init__(self, model: AttentionStack, *, requests: int, max_len: int) -> None:
        config, weight = model.config, model.lm_head.weight
        groups = block_groups(config)
        limits = RunnerLimits(
            config=config,
            max_num_reqs=requests,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_len,
        )
        # a request gets all of its blocks here before it gives back those that left the window
        counts = {
            group.name: count + group.end_block(max_len)
            for group, count in zip(groups, limits.count_blocks(groups, {}).values(), strict=True)
        }
        self._device, self._vocab = weight.device, config.vocab_size
        self._blocks = BlockAllocator(groups, counts, requests, max_len)
        self._builder = BatchBuilder(config, self._blocks, requests)
        bind_caches(model, allocate_caches(config, counts, dtype=weight.dtype, device=weight.device))  # type: ignore[arg-type]

    def decode(self, tokens: int, context: int) -> Inputs:
        """One token of each of so many requests, all with about that many tokens before it."""
        return self._inputs([(context + row % 4, context + row % 4 + 1) for row in range(tokens)])

    def prefill(self, tokens: int) -> Inputs:
        """The first tokens of one request."""
        return self._inputs([(0, tokens)])

    def _inputs(self, spans: Sequence[tuple[int, int]]) -> Inputs:
        chunks = [self._chunk(number, start, end) for number, (start, end) in enumerate(spans)]
        host = self._builder.build([chunk.span() for chunk in chunks])
        for chunk in chunks:
            assert chunk.request.row is not None
            self._blocks.close_row(chunk.request.row)
        moved = {name: tensor.to(self._device) for name, tensor in host.items()}
        ids, positions = moved.pop("input_ids"), moved.pop("positions")
        return ids, positions, mark_request_dims(StepState(**moved))

    def _chunk(self, number: int, start: int, end: int) -> Chunk:
        row = self._blocks.open_row()
        self._blocks.extend(row, end)
        self._blocks.release_before(row, start)
        tokens = [(number * 31 + token * 7) % self._vocab for token in range(end)]
        return Chunk(Request(number, tokens, end, 1, row=row), start, end)


def step_in_place(call: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    """A call whose inputs stay where they are; nothing is made for it."""
    for tensor in tensors_of(inputs):
        torch._dynamo.mark_static_address(tensor)
    return lambda: call(*inputs)


def step_renewed(call: Callable[..., Any], inputs: Inputs, *, reads_new: bool) -> Callable[[], Any]:
    """A call before which every input is made anew, by one copy each, whether the call then reads the new ones or not.

    Args:
        call: the model.
        inputs: what is copied.
        reads_new: whether it is given the new ones; a captured step that reads its inputs in place is not.
    """
    if not reads_new:
        step_in_place(call, inputs)

    def run() -> Any:
        new = renewed(inputs)
        return call(*(new if reads_new else inputs))

    return run


def renewed(inputs: Inputs) -> Inputs:
    """New tensors with the same values, marked as a runner marks them."""
    ids, positions, step = inputs
    fields = {field.name: getattr(step, field.name).clone() for field in dataclasses.fields(step)}
    return ids.clone(), positions.clone(), mark_request_dims(StepState(**fields))


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """All tensors of a step."""
    ids, positions, step = inputs
    return [ids, positions, *(getattr(step, field.name) for field in dataclasses.fields(step))]


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """By this package, which importing makes known to torch."""
    made: Callable[..., Any] = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)
    return made


def inductor_of(bench: Bench) -> str:
    """The piece compiler that is measured; in a dry run one that needs no C++ compiler."""
    return bench.pick("inductor", "aot_eager")


@contextmanager
def many_recompiles() -> Iterator[None]:
    """Room in Dynamo for all that a section compiles."""
    name = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    with torch._dynamo.config.patch({name: MOST_RECOMPILES}):
        yield
