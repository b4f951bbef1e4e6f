"""Buffers that all layers of a model share: RoPE tables and the selected block ids.

Each lives in a small module that every layer holds as a child, so that moving the model moves it once and the layers
keep sharing it; a buffer registered on each layer would be copied per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import DeepseekV4Config, LayerKind
from .rope import RotaryTable


class TopkIndices(nn.Module):
    """Block ids selected by the indexer: int32 [max_num_batched_tokens, index_topk], rewritten by each C4A layer."""

    indices: Tensor

    def __init__(self, config: DeepseekV4Config, device: torch.device | str | None = None) -> None:
        super().__init__()
        shape = (config.max_num_batched_tokens, config.index_topk)
        self.register_buffer("indices", torch.full(shape, -1, dtype=torch.int32, device=device), persistent=False)


class SharedBuffers:
    """Makes each shared module when a layer first asks for it; give one object to all layers of a model."""

    def __init__(self, config: DeepseekV4Config, device: torch.device | str | None = None) -> None:
        self._config = config
        self._device = device
        self._rotary: dict[bool, RotaryTable] = {}
        self._topk: TopkIndices | None = None

    def rotary(self, kind: LayerKind) -> RotaryTable:
        """The RoPE table of a layer kind; both compressed kinds use the same one."""
        compressed = kind is not LayerKind.SWA
        if compressed not in self._rotary:
            self._rotary[compressed] = RotaryTable(self._config, kind, self._device)
        return self._rotary[compressed]

    def topk(self) -> TopkIndices:
        """The buffer of selected block ids."""
        if self._topk is None:
            self._topk = TopkIndices(self._config, self._device)
        return self._topk
