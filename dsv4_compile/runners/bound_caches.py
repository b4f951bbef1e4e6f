"""The caches of a runner, on the attention layers of its model.

A layer has one set of caches. A second runner on the same model takes the layers over, and the first one would go on
writing block numbers of caches that are gone; it notices instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from ..errors import RunnerError
from ..models.deepseek_v4.attention import DeepseekV4Attention
from ..models.deepseek_v4.bind_caches import bind_caches
from ..models.deepseek_v4.caches import CacheGroup, allocate_caches
from ..models.deepseek_v4.config import DeepseekV4Config


class BoundCaches:
    """Allocates caches for the layers found in a module and binds them.

    Args:
        module: holds the attention layers.
        config: sizes and formats of the caches.
        num_blocks: blocks by group.
        device: where the caches live; None: where the layers are.
        drafter: may hold more attention layers, or some of the same.

    Attributes:
        device: where the caches live.

    Raises:
        RunnerError: the module has no attention layer of ours, or is no module at all.
        CacheBindingError: the configuration is not that of the layers.
    """

    def __init__(
        self,
        module: object,
        config: DeepseekV4Config,
        num_blocks: Mapping[str, int],
        device: torch.device | str | None,
        drafter: object = None,
    ) -> None:
        self._layers = [*_attention_layers(module), *_find_layers(drafter)]
        weight = self._layers[0].wq_b.weight
        self.device = weight.device if device is None else torch.device(device)
        counts = cast("Mapping[CacheGroup, int]", num_blocks)
        most = max(config.num_hidden_layers, *(layer.layer_idx + 1 for layer in self._layers))
        num_layers = min(most, len(config.compress_ratios))  # binding names a layer for which there are none
        self._caches = allocate_caches(
            config,
            counts,
            dtype=weight.dtype,
            device=self.device,
            num_layers=num_layers,
        )
        bind_caches(nn.ModuleList(self._layers), self._caches)

    def check(self) -> None:
        """Raise RunnerError unless the layers still have these caches."""
        if any(layer.swa_cache is not self._caches[layer.layer_idx].swa_cache for layer in self._layers):
            raise RunnerError(
                "the attention layers no longer have this runner's caches: another runner was built on the same model, "
                "or the model was moved; build a new runner"
            )


def _attention_layers(module: object) -> list[DeepseekV4Attention]:
    layers = _find_layers(module)
    if not layers:
        raise RunnerError(
            f"no DeepseekV4Attention layer in {type(module).__name__}; pass the module that holds the layers as "
            "attention=, or swap them in with dsv4_compile.integrations.transformers.swap_attention"
        )
    return layers


def _find_layers(module: object) -> list[DeepseekV4Attention]:
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return [layer for layer in modules if isinstance(layer, DeepseekV4Attention)]
