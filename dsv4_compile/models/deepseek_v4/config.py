"""What of a DeepSeek V4 configuration the attention layers need, read from any of the layouts that exist.

Released checkpoints name the layers by `compress_ratios` (one entry more than there are layers: the last one is the
multi-token-prediction layer) and keep one flat `rope_scaling`. transformers' `save_pretrained` names them by
`layer_types` and nests `rope_parameters`. A value that means something this package does not build is an error here,
not a surprise in a kernel.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ...errors import UnsupportedConfigError, did_you_mean
from ...ops.cache_formats import FP8, FP8_DS_MLA, MXFP4, PLAIN
from .cache_dtypes import INDEX_WORDS, KV_WORDS, packed_format, read_cache_dtype, stored_dtype
from .checks import Kind, Values, check_kind, check_numbers
from .rope_parameters import RopeScaling, YarnScaling, read_rope

Fields: TypeAlias = dict[str, Any]  # values for the fields of the configuration, which checks them itself


class LayerKind(Enum):
    """The three kinds of attention layer; the value is the compression ratio (0: no compressed entries)."""

    SWA = 0
    C4A = 4
    C128A = 128

    @property
    def overlap(self) -> int:
        """How many blocks a compressed entry pools over: its own, and for C4A the one before as well."""
        return 2 if self is LayerKind.C4A else 1


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config:
    """Sizes of the attention layers and of their caches.

    Field names are those of the Hugging Face configuration. What is ours:

    Attributes:
        compress_ratios: one of 0, 4, 128 per layer; more entries than layers are kept and not used (the released
            checkpoints add one for their MTP layer).
        rope_scaling, main_rope_scaling: of the compressed layers and of the sliding-window layers; the released models
            scale the first only.
        max_num_batched_tokens: rows of the persistent top-k buffer: the most tokens of one step.
        kv_cache_dtype: of the sliding window and the compressed entries: "auto" (the dtype of the model), "float32",
            "bf16" ("bfloat16"), a torch dtype of these, or "fp8_ds_mla".
        index_cache_dtype: of the indexer's keys, and of its queries where it is packed: "auto" (`kv_cache_dtype`, or
            the dtype of the model if that is packed), "float32", "bf16", a torch dtype, "fp8" or "mxfp4".
        swa_block_size: tokens in a block of the sliding-window cache.
        compressed_block_size: tokens in a block of the compressed caches; it holds that many // ratio rows.
        c4_state_block_size, c128_state_block_size: tokens in a block of the compressor state caches.

    Raises:
        UnsupportedConfigError: a value that this package does not build, or sizes that do not fit together.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    vocab_size: int
    main_rope_scaling: RopeScaling | None = None
    max_num_batched_tokens: int = 8192
    kv_cache_dtype: str | torch.dtype = "auto"
    index_cache_dtype: str | torch.dtype = "auto"
    swa_block_size: int = 64
    compressed_block_size: int = 256
    c4_state_block_size: int = 4
    c128_state_block_size: int = 8

    def __post_init__(self) -> None:
        check_numbers(self)
        for name in ("rope_scaling", "main_rope_scaling"):
            if (scaling := getattr(self, name)) is not None:
                check_kind(name, scaling, RopeScaling, "a LinearScaling, a YarnScaling or None")
                check_numbers(scaling)
        object.__setattr__(self, "compress_ratios", tuple(self.compress_ratios))
        for name, words in (("kv_cache_dtype", KV_WORDS), ("index_cache_dtype", INDEX_WORDS)):
            object.__setattr__(self, name, read_cache_dtype(name, getattr(self, name), words))
        _check_layers(self.compress_ratios, self.num_hidden_layers)
        _check_sizes(self)
        _check_packing(self)

    def kind(self, layer_idx: int) -> LayerKind:
        """The kind of a layer."""
        return LayerKind(self.compress_ratios[layer_idx])

    def rope(self, kind: LayerKind) -> tuple[float, RopeScaling | None]:
        """Base and scaling of every RoPE in a layer of the given kind."""
        if kind is LayerKind.SWA:
            return self.rope_theta, self.main_rope_scaling
        return self.compress_rope_theta, self.rope_scaling

    @property
    def kv_format(self) -> str:
        """How the ops call the format of the sliding window and the compressed entries: "auto" for plain rows."""
        return packed_format(self.kv_cache_dtype)

    @property
    def index_format(self) -> str:
        """How the ops call the format of the indexer's keys: "auto" for plain rows."""
        return packed_format(self.index_cache_dtype)

    def cache_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the key and value caches of a model of the given dtype; uint8 where they are packed."""
        return self.kv_dtype or model_dtype

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """The dtype of the key and value caches, uint8 where they are packed; None: that of the model."""
        return stored_dtype(self.kv_cache_dtype)

    @property
    def index_dtype(self) -> torch.dtype | None:
        """The dtype of the caches of indexer keys, uint8 where they are packed; None: that of the model."""
        follows = self.index_cache_dtype == PLAIN and self.kv_format == PLAIN
        return self.kv_dtype if follows else stored_dtype(self.index_cache_dtype)

    def with_cache_dtypes(
        self, kv_cache_dtype: str | torch.dtype | None, index_cache_dtype: str | torch.dtype | None
    ) -> DeepseekV4Config:
        """The same with other cache formats; None keeps what there is.

        Raises:
            UnsupportedConfigError: no such format, or one that does not fit the sizes.
        """
        return replace(
            self,
            kv_cache_dtype=self.kv_cache_dtype if kv_cache_dtype is None else kv_cache_dtype,
            index_cache_dtype=self.index_cache_dtype if index_cache_dtype is None else index_cache_dtype,
        )

    def state_block_size(self, kind: LayerKind) -> int:
        """Tokens in a block of the compressor state cache of a layer kind."""
        return self.c4_state_block_size if kind is LayerKind.C4A else self.c128_state_block_size

    @classmethod
    def from_hf(cls, config: object, **overrides: object) -> DeepseekV4Config:
        """Read a Hugging Face configuration.

        Args:
            config: a dict as in config.json, a path (of a config.json or of the folder that holds it), or a
                transformers configuration object; layers as `compress_ratios` or as `layer_types`.
            overrides: fields of this class that replace or complete what the configuration says.

        Raises:
            FileNotFoundError: there is no file at the path.
            UnsupportedConfigError: `config` is none of these, a field is missing or asks for something this package
                does not build, or an override names no field.
        """
        values = config_values(config)
        for name, (kind, words) in _NESTED.items():
            if values.get(name) is not None:
                check_kind(name, values[name], kind, words)
        read = {name: values[name] for name in (f.name for f in fields(cls)) if values.get(name) is not None}
        read["compress_ratios"] = _read_ratios(values)
        # what transformers fills in when it reads a configuration, an object of it may still lack
        is_object = not isinstance(config, (Mapping, str, os.PathLike))
        read.update(read_rope(values, None if is_object else values.get("partial_rotary_factor")))
        read.update(_checked(overrides))
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in read]
        if missing:
            raise UnsupportedConfigError(
                f"the configuration lacks {', '.join(missing)}; pass them as keyword arguments"
            )
        return cls(**read)

    @classmethod
    def flash(cls, **overrides: object) -> DeepseekV4Config:
        """The released Flash model: 43 layers, 64 heads.

        Args:
            overrides: fields that get another value.

        Raises:
            UnsupportedConfigError: an override names no field, or asks for something this package does not build.
        """
        return cls(**{**_SHARED, **_FLASH, **_checked(overrides)})

    @classmethod
    def pro(cls, **overrides: object) -> DeepseekV4Config:
        """The released Pro model: 61 layers, 128 heads.

        Args:
            overrides: fields that get another value.

        Raises:
            UnsupportedConfigError: an override names no field, or asks for something this package does not build.
        """
        return cls(**{**_SHARED, **_PRO, **_checked(overrides)})

    @classmethod
    def tiny(cls, compress_ratios: Sequence[int], **overrides: object) -> DeepseekV4Config:
        """No released model: sizes to try things with on a CPU, and one layer for each ratio.

        Args:
            compress_ratios: 0, 4 or 128 for each layer.
            overrides: fields that get another value.

        Raises:
            UnsupportedConfigError: an override names no field, or asks for something this package does not build.
        """
        layers = {"compress_ratios": tuple(compress_ratios), "num_hidden_layers": len(compress_ratios)}
        return cls(**{**_SHARED, **_TINY, **layers, **_checked(overrides)})


_SHARED: Fields = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": YarnScaling(factor=16.0, original_max_position_embeddings=65536),
    "max_position_embeddings": 1048576,
    "vocab_size": 129280,
}
_FLASH: Fields = {
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "compress_ratios": (0, 0, *(4, 128) * 20, 4, 0),
    "index_topk": 512,
}
_PRO: Fields = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": (128, 128, *(4, 128) * 29, 4, 0),
    "index_topk": 1024,
}
_TINY: Fields = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "sliding_window": 16,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 8,
    "rope_scaling": None,
    "max_position_embeddings": 1024,
    "vocab_size": 64,
    "max_num_batched_tokens": 256,
}
# what is computed with before the fields of the class can be checked
_NESTED: dict[str, tuple[Kind, str]] = {
    "compress_ratios": ((list, tuple), "a list"),
    "layer_types": ((list, tuple), "a list"),
    "compress_rates": (Mapping, "a dict"),
    "rope_parameters": (Mapping, "a dict"),
    "rope_scaling": (Mapping, "a dict"),
    "head_dim": (int, "an integer"),
    "qk_rope_head_dim": (int, "an integer"),
    "partial_rotary_factor": ((int, float), "a number"),
}
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def config_values(config: object) -> Values:
    """The values of a configuration by name.

    Args:
        config: a dict, a path of a config.json or of the folder that holds it, or a transformers configuration.

    Raises:
        FileNotFoundError: no such file.
        UnsupportedConfigError: none of these, or the file holds no dict.
    """
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise UnsupportedConfigError(f"{path} holds {config!r:.40}; it must be a dict")
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else config
    if not isinstance(values, Mapping):
        raise UnsupportedConfigError(
            f"{config!r:.40} is no configuration: give a dict, a path or a configuration of transformers"
        )
    return values


def _checked(overrides: Fields) -> Fields:
    valid = [field.name for field in fields(DeepseekV4Config)]
    for name in overrides:
        if name not in valid:
            raise UnsupportedConfigError(
                f"DeepseekV4Config has no field {name!r}{did_you_mean(name, valid)} Valid: {', '.join(valid)}"
            )
    return overrides


def _read_ratios(values: Values) -> tuple[int, ...]:
    if values.get("compress_ratios") is not None:
        return tuple(values["compress_ratios"])
    layer_types = values.get("layer_types")
    if layer_types is None:
        raise UnsupportedConfigError("the configuration has neither compress_ratios nor layer_types")
    rates = {**_LAYER_TYPES, **(values.get("compress_rates") or {})}
    unknown = dict.fromkeys(str(name) for name in layer_types if not isinstance(name, str) or name not in rates)
    if unknown:
        raise UnsupportedConfigError(f"layer_types has {', '.join(unknown)}; supported are {', '.join(_LAYER_TYPES)}")
    return tuple(rates[layer_type] for layer_type in layer_types)


def _check_layers(ratios: tuple[int, ...], num_layers: int) -> None:
    known = [kind.value for kind in LayerKind]
    for layer_idx, ratio in enumerate(ratios):
        if ratio not in known:
            raise UnsupportedConfigError(f"layer {layer_idx} has compression ratio {ratio!r}; supported are {known}")
    if len(ratios) < num_layers:
        raise UnsupportedConfigError(f"compress_ratios has {len(ratios)} entries for {num_layers} layers")


def _check_sizes(config: DeepseekV4Config) -> None:
    if config.num_attention_heads % config.o_groups:
        raise UnsupportedConfigError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of o_groups {config.o_groups}"
        )
    rope = config.qk_rope_head_dim
    if rope % 2 or rope > min(config.head_dim, config.index_head_dim):
        raise UnsupportedConfigError(
            f"qk_rope_head_dim {rope} must be even and at most head_dim {config.head_dim} "
            f"and index_head_dim {config.index_head_dim}"
        )
    for ratio in {kind.value for kind in map(LayerKind, config.compress_ratios)} - {0}:
        if config.compressed_block_size % ratio:
            raise UnsupportedConfigError(
                f"compressed_block_size {config.compressed_block_size} is not a multiple of the ratio {ratio}"
            )


def _check_packing(config: DeepseekV4Config) -> None:
    """Parts of a page that hold several bytes a number must begin where such a number may lie."""
    if config.kv_format == FP8_DS_MLA and config.head_dim % 2:
        raise UnsupportedConfigError(f"kv_cache_dtype {FP8_DS_MLA!r} needs an even head_dim, not {config.head_dim}")
    rows, width = config.compressed_block_size // LayerKind.C4A.value, config.index_head_dim
    if config.index_format == MXFP4 and width % 2:
        raise UnsupportedConfigError(f"index_cache_dtype {MXFP4!r} needs an even index_head_dim, not {width}")
    if config.index_format == FP8 and rows * width % 4:
        raise UnsupportedConfigError(
            f"index_cache_dtype {FP8!r} needs {rows} rows of index_head_dim {width} to be a multiple of 4 bytes"
        )
