"""A small language model of attention layers alone: what tests, benchmarks and examples run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import DeepseekV4Attention
from .config import DeepseekV4Config
from .norm import RMSNorm
from .shared import SharedBuffers
from .step import StepState


class StackLayer(nn.Module):
    """Pre-norm attention with a residual."""

    def __init__(self, config: DeepseekV4Config, layer_idx: int, shared: SharedBuffers) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = DeepseekV4Attention(config, layer_idx, shared)

    def forward(self, hidden_states: Tensor, positions: Tensor, step: StepState) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        attended: Tensor = self.attention(self.norm(hidden_states), positions, step)
        return hidden_states + attended


class AttentionStack(nn.Module):
    """Embedding, attention layers, norm and language-model head; weights random from `seed`."""

    def __init__(self, config: DeepseekV4Config, *, seed: int = 0) -> None:
        super().__init__()
        shared = SharedBuffers(config)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(StackLayer(config, i, shared) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        randomise_(self, seed=seed)

    def forward(self, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        """Logits [T, vocab] of input_ids [T] int64 at positions [T] int64."""
        # not the module's forward: its float norm_type would be an input, see the note "float constants"
        hidden_states = nn.functional.embedding(input_ids, self.embedding.weight)
        for layer in self.layers:
            hidden_states = layer(hidden_states, positions, step)
        logits: Tensor = self.lm_head(self.norm(hidden_states))
        return logits


@torch.no_grad()
def randomise_(module: nn.Module, *, seed: int = 0) -> None:
    """Draw every parameter anew: matrices with a variance that keeps activations near 1, norms around 1.

    Sinks and position biases become non-zero as well, so that a test notices when they are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("norm", "norm.weight")):
            drawn = 1 + 0.1 * drawn
        elif name.endswith("weight") and "embedding" not in name:
            drawn = drawn * parameter.shape[-1] ** -0.5
        parameter.copy_(drawn)
