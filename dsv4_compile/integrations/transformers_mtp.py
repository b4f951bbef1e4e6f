"""The MTP block of a checkpoint, which transformers leaves out: its weights, and the block made of them.

The released files have it as `mtp.0.*`. It is an ordinary layer with a few weights more, so it is loaded by
transformers as one: `WithMTP` is its language model with the block beside the layers, under names to which
transformers' own renamings lead. So whatever transformers does to a layer (names, merged experts, sharded files,
dequantising, weights that stay fp32) it does to the block, and what is missing or has another size it reports.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config as TheirConfig
from transformers import DeepseekV4ForCausalLM
from transformers import initialization as init
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
)

from ..errors import UnsupportedConfigError
from ..models.deepseek_v4.checks import Values
from ..models.deepseek_v4.mtp import MTPBlock
from ..models.deepseek_v4.step import StepState

_PREFIX = "mtp."


class MTPLayer(DeepseekV4DecoderLayer):  # type: ignore[misc]  # transformers has no types
    """The weights of the block: those of a layer, and its own. It is not called; `mtp_block` makes what is."""

    def __init__(self, config: TheirConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        hidden, streams = config.hidden_size, config.hc_mult
        self.e_proj = nn.Linear(hidden, hidden, bias=False)
        self.h_proj = nn.Linear(hidden, hidden, bias=False)
        self.enorm = DeepseekV4RMSNorm(hidden, eps=config.rms_norm_eps)
        self.hnorm = DeepseekV4RMSNorm(hidden, eps=config.rms_norm_eps)
        self.kv_norm = DeepseekV4RMSNorm(hidden, eps=config.rms_norm_eps)  # "norm" in files: any ".norm." is renamed so
        self.hc_head_fn = nn.Parameter(torch.empty(streams, streams * hidden))
        self.hc_head_base = nn.Parameter(torch.empty(streams))
        self.hc_head_scale = nn.Parameter(torch.empty(1))


class WithMTP(DeepseekV4ForCausalLM):  # type: ignore[misc]  # transformers has no types
    """A `DeepseekV4ForCausalLM` with the weights of its MTP block; it computes and generates without it.

    Attributes:
        mtp: the one block.
    """

    _keep_in_fp32_modules_strict = (
        *DeepseekV4ForCausalLM._keep_in_fp32_modules_strict,
        *("enorm", "hnorm", "hc_head_fn", "hc_head_base", "hc_head_scale"),
    )

    def __init__(self, config: TheirConfig) -> None:
        super().__init__(config)
        one_more = copy.copy(config)
        one_more.layer_types = [*config.layer_types, "sliding_attention"]
        one_more.mlp_layer_types = [*config.mlp_layer_types, "moe"]
        self.mtp = nn.ModuleList([MTPLayer(one_more, config.num_hidden_layers)])
        for module in self.mtp.modules():
            if getattr(module, "config", None) is one_more:
                module.config = config  # what is set on the model later is set for the block too
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Also of the block's head, as of the model's; weights that are loaded are left alone."""
        super()._init_weights(module)
        if isinstance(module, MTPLayer):
            init.normal_(module.hc_head_fn, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.hc_head_base)
            init.ones_(module.hc_head_scale)

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: what transformers asks before it applies its own renamings."""
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As the base class, which transformers would look for in the source of this file."""
        return bool(DeepseekV4ForCausalLM._can_set_experts_implementation())


class StreamsBlock(nn.Module):
    """A layer of transformers, with our attention in it, as `MTPBlock` calls its block: [T, n, hidden] both ways."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, streams: Tensor, input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        """[T, n, hidden] to [T, n, hidden]."""
        made: Tensor = self.layer(
            streams.unsqueeze(0), input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), step=step
        )
        return made.squeeze(0)


class StreamsHead(nn.Module):
    """A head of transformers, [T, n, hidden] to [T, hidden]."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, streams: Tensor) -> Tensor:
        """[T, n, hidden] to [T, hidden]."""
        made: Tensor = self.head(streams.unsqueeze(0))
        return made.squeeze(0)


def mtp_block(model: WithMTP, swapped_layer: nn.Module) -> MTPBlock:
    """The block to draft with, on the weights of a model.

    Args:
        model: as it was loaded.
        swapped_layer: the layer of its block, with our attention in it.
    """
    layer: Any = model.mtp[0]
    with torch.device("meta"):
        head = DeepseekV4HyperHead(model.config)
    head.hc_fn, head.hc_base, head.hc_scale = layer.hc_head_fn, layer.hc_head_base, layer.hc_head_scale
    return MTPBlock(
        embedding=model.model.embed_tokens,
        lm_head=model.lm_head,
        enorm=layer.enorm,
        hnorm=layer.hnorm,
        e_proj=layer.e_proj,
        h_proj=layer.h_proj,
        block=StreamsBlock(swapped_layer),
        head=StreamsHead(head),
        norm=layer.kv_norm,
    )


def check_mtp_config(file: Path, values: Values, num_layers: int) -> None:
    """Refuse a configuration whose MTP block is none that is built here.

    Args:
        file: where it was read, for the message.
        values: the configuration.
        num_layers: layers of the model itself.

    Raises:
        UnsupportedConfigError: more blocks than one, or another kind of attention in it.
    """
    count = values.get("num_nextn_predict_layers", 1)
    if count != 1:
        raise UnsupportedConfigError(
            f"{file} has num_nextn_predict_layers {count!r}; mtp=True needs exactly 1 MTP block"
        )
    ratios = values.get("compress_ratios") or ()
    if len(ratios) > num_layers and ratios[num_layers] != 0:
        raise UnsupportedConfigError(
            f"{file} has compression ratio {ratios[num_layers]!r} for its MTP block (entry {num_layers} of "
            "compress_ratios); it must be 0, a sliding window"
        )


def check_mtp_loaded(folder: Path, missing: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a checkpoint without the block, or with a part of it.

    Args:
        folder: of the checkpoint, for the message.
        missing: names of weights that it lacks.
        names: those of all weights.

    Raises:
        UnsupportedConfigError: weights of the block are missing.
    """
    block = [name for name in names if name.startswith(_PREFIX)]
    lacking = sorted(name for name in missing if name.startswith(_PREFIX))
    if len(lacking) == len(block):
        raise UnsupportedConfigError(
            f"{folder}: the checkpoint has no MTP block, no weight is named {_PREFIX}0.*; load it without mtp=True, or "
            "copy the file that has them"
        )
    if lacking:
        raise UnsupportedConfigError(
            f"{folder}: the MTP block of the checkpoint lacks {len(lacking)} of its {len(block)} weights, for example "
            f"{lacking[0]}; is a file missing?"
        )
