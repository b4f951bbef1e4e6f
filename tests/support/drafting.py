"""Models that draft: a stack of attention layers with an MTP block, and drafters whose hits and misses are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from paging import tiny_config
from torch import Tensor, nn

from dsv4_compile.models.deepseek_v4 import (
    AttentionStack,
    DeepseekV4Attention,
    DeepseekV4Config,
    MTPBlock,
    RMSNorm,
    SharedBuffers,
    StepState,
    randomise_,
)
from dsv4_compile.models.deepseek_v4.caches import layer_cache_specs
from dsv4_compile.models.deepseek_v4.stack import StackLayer
from dsv4_compile.ops import cache_formats
from dsv4_compile.runners import ModelRunner

# One layer of each kind, and the window layer of the MTP block.
RATIOS = (0, 4, 128, 0)


def drafting_config(**overrides: object) -> DeepseekV4Config:
    """Three layers; the last of the four ratios is the MTP block's."""
    return tiny_config(RATIOS, **{"num_hidden_layers": 3, **overrides})


class Embedding(nn.Module):
    """A look-up; the module of torch has a float that a compiler would take for an input."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(input_ids, self.weight)


class OneStream(nn.Module):
    """A layer of the stack on streams [T, 1, hidden]."""

    def __init__(self, layer: StackLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, streams: Tensor, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        return self.layer(streams.squeeze(1), positions, step).unsqueeze(1)


class Squeeze(nn.Module):
    def forward(self, streams: Tensor) -> Tensor:
        return streams.squeeze(1)


class DraftingStack(AttentionStack):
    """An attention stack that returns its streams [T, 1, hidden] too, with a drafter.

    A token depends mostly on the one before it, in the model and in the drafter, so that some drafts hit.

    Attributes:
        drafter: shares embedding and head.
    """

    def __init__(self, config: DeepseekV4Config, *, seed: int = 0, strength: float = 1.0) -> None:
        super().__init__(config, seed=seed)
        hidden = config.hidden_size
        self.drafter = MTPBlock(
            embedding=Embedding(self.embedding.weight),
            lm_head=self.lm_head,
            enorm=RMSNorm(hidden, config.rms_norm_eps),
            hnorm=RMSNorm(hidden, config.rms_norm_eps),
            e_proj=nn.Linear(hidden, hidden, bias=False),
            h_proj=nn.Linear(hidden, hidden, bias=False),
            block=OneStream(StackLayer(config, config.num_hidden_layers, SharedBuffers(config))),
            head=Squeeze(),
            norm=RMSNorm(hidden, config.rms_norm_eps),
        )
        randomise_(self.drafter.block, seed=seed + 1)
        with torch.no_grad():
            for norm in (self.norm, *(layer.norm for layer in self.layers), self.drafter.norm):
                norm.weight.fill_(1)
            self.drafter.e_proj.weight.copy_(torch.eye(hidden))
            self.drafter.h_proj.weight.copy_(0.1 * torch.eye(hidden))
            for module in self.modules():
                if isinstance(module, DeepseekV4Attention):
                    module.wo_b.weight.mul_(strength)

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> tuple[Tensor, Tensor]:
        hidden_states = nn.functional.embedding(input_ids, self.embedding.weight)
        for layer in self.layers:
            hidden_states = layer(hidden_states, positions, step)
        return self.lm_head(self.norm(hidden_states)), hidden_states.unsqueeze(1)


class WithStreams(nn.Module):
    """Gives a model streams that say nothing but positions."""

    def __init__(self, model: AttentionStack) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> tuple[Tensor, Tensor]:
        return self.model(input_ids, positions, step), positions.float().view(-1, 1, 1)


class Script:
    """A drafter that knows the answer of one request, and misses where it is told to.

    Args:
        tokens: prompt and answer.
        misses: whether the draft of the token at a position is wrong.
        vocab: ids.
    """

    def __init__(self, tokens: Sequence[int], misses: Callable[[int], bool], vocab: int) -> None:
        self._tokens, self._misses, self._vocab = tokens, misses, vocab

    def __call__(self, input_ids: Tensor, positions: Tensor, step: StepState, streams: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(len(input_ids), self._vocab)
        for row, position in enumerate(positions.tolist()):
            place = position + 2
            if place < len(self._tokens):
                logits[row, (self._tokens[place] + self._misses(place)) % self._vocab] = 1.0
        return logits, streams


def poison_what_is_not_computed(runner: ModelRunner) -> None:
    """Write NaN, in every cache, to every row that no computed token of a running request may still use.

    Rows of rejected drafts are among them, and entries of blocks that they closed.
    """
    config = runner.limits.config
    computed = {name: _computed_tokens(runner, name) for name in runner.blocks.num_blocks}
    for layer, caches in enumerate(runner._caches._caches):
        kind = config.kind(layer)
        for spec in layer_cache_specs(config, kind):
            kept = computed[spec.group] // (spec.block_tokens // spec.rows)
            for part in _parts_of_rows(getattr(caches, spec.name), spec.name, config):
                part[torch.arange(spec.rows) >= kept.unsqueeze(1)] = 255 if part.dtype is torch.uint8 else torch.nan


def _parts_of_rows(cache: Tensor, name: str, config: DeepseekV4Config) -> tuple[Tensor, ...]:
    """Views [blocks, rows, ...] of a cache that have each row's own bytes: of a packed one, data and scales apart.

    The byte 255 is NaN in a packed row, as its scales are.
    """
    if cache.dtype is not torch.uint8:
        return (cache,)
    if name == "indexer_k_cache":
        return cache_formats._parts_of(cache, config.index_format, config.index_head_dim, 0)
    return cache_formats._parts_of(cache, config.kv_format, config.head_dim, config.qk_rope_head_dim)


def _computed_tokens(runner: ModelRunner, name: str) -> Tensor:
    """How many tokens of each block of a group are computed."""
    table, size = runner.blocks.table(name), runner.blocks._pools[name].group.block_size
    computed = torch.zeros(runner.blocks.num_blocks[name], dtype=torch.int64)
    for request in runner._active.values():
        if request.row is not None:
            blocks = table[request.row]
            tokens = (request.num_computed - size * torch.arange(len(blocks))).clamp(0, size)
            computed[blocks[blocks >= 0].long()] = tokens[blocks >= 0]
    return computed
