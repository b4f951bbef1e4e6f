"""Gives the attention layers of a model their caches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...errors import CacheBindingError
from .attention import DeepseekV4Attention
from .caches import LayerCaches


def bind_caches(module: nn.Module, caches: Sequence[LayerCaches]) -> None:
    """Put the caches on the attention layers found in a module, by their layer index, as non-persistent buffers.

    Args:
        module: anything that contains `DeepseekV4Attention` layers.
        caches: one entry per layer index, as from `allocate_caches`. Bind after casting the model: a cast of
            bound caches would cast their fp32 states too.

    Raises:
        CacheBindingError: there is no entry for a layer, or one for another kind of layer; no layer is bound then.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, DeepseekV4Attention)]
    for layer in layers:
        if layer.layer_idx >= len(caches):
            raise CacheBindingError(
                f"attention layer {layer.layer_idx} has no entry in caches (length {len(caches)}): allocate the caches "
                "with the configuration of the model"
            )
        layer.check_caches(caches[layer.layer_idx])
    for layer in layers:
        layer.bind(caches[layer.layer_idx])
