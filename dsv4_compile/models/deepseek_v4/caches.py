"""The paged caches of a model: what each layer kind needs, allocation, and binding to the layers.

Caches of one group share block tables and slot mappings, so a runner hands out blocks per group and not per layer.
They are bound as buffers, so that a compiler takes them for static inputs whose addresses stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from .config import DeepseekV4Config, LayerKind

CacheGroup = Literal["swa", "compressed", "c4_state", "c128_state"]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """One cache of a layer, of shape [num_blocks, rows, width].

    Attributes:
        name: field of `LayerCaches`.
        group: caches of a group share block tables; one block covers the same tokens in all of them.
        block_tokens: tokens a block covers.
        rows: rows of a block: `block_tokens` over the compression ratio.
        width: elements of a row.
        dtype: None means the cache dtype of the model.
    """

    name: str
    group: CacheGroup
    block_tokens: int
    rows: int
    width: int
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class LayerCaches:
    """The caches of one layer; None where its kind has no such cache."""

    swa_cache: Tensor
    kv_cache: Tensor | None = None
    indexer_k_cache: Tensor | None = None
    state_cache: Tensor | None = None
    indexer_state_cache: Tensor | None = None

    def names(self) -> set[str]:
        """Names of the caches that are there."""
        return {field.name for field in fields(self) if getattr(self, field.name) is not None}


def swa_spec(config: DeepseekV4Config) -> CacheSpec:
    """Keys = values of the sliding window; every layer has one."""
    return CacheSpec(
        name="swa_cache",
        group="swa",
        block_tokens=config.swa_block_size,
        rows=config.swa_block_size,
        width=config.head_dim,
    )


def compressed_spec(config: DeepseekV4Config, kind: LayerKind) -> CacheSpec:
    """Compressed keys = values of C4A and C128A layers."""
    return CacheSpec(
        name="kv_cache",
        group="compressed",
        block_tokens=config.compressed_block_size,
        rows=config.compressed_block_size // kind.value,
        width=config.head_dim,
    )


def indexer_k_spec(config: DeepseekV4Config) -> CacheSpec:
    """Compressed keys of the indexer of C4A layers."""
    return CacheSpec(
        name="indexer_k_cache",
        group="compressed",
        block_tokens=config.compressed_block_size,
        rows=config.compressed_block_size // LayerKind.C4A.value,
        width=config.index_head_dim,
    )


def state_spec(config: DeepseekV4Config, kind: LayerKind) -> CacheSpec:
    """fp32 compressor states (kv then score) of the main compressor of C4A and C128A layers."""
    return _state_spec(config, kind, "state_cache", config.head_dim)


def indexer_state_spec(config: DeepseekV4Config) -> CacheSpec:
    """fp32 compressor states of the indexer's compressor of C4A layers."""
    return _state_spec(config, LayerKind.C4A, "indexer_state_cache", config.index_head_dim)


def layer_cache_specs(config: DeepseekV4Config, kind: LayerKind) -> tuple[CacheSpec, ...]:
    """All caches of a layer of the given kind."""
    specs = [swa_spec(config)]
    if kind is not LayerKind.SWA:
        specs += [compressed_spec(config, kind), state_spec(config, kind)]
    if kind is LayerKind.C4A:
        specs += [indexer_k_spec(config), indexer_state_spec(config)]
    return tuple(specs)


def allocate_caches(
    config: DeepseekV4Config,
    num_blocks: Mapping[CacheGroup, int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> list[LayerCaches]:
    """Allocate zeroed caches for every layer.

    Args:
        config: sizes and layer kinds.
        num_blocks: blocks of each group: "swa", "compressed", "c4_state", "c128_state".
        dtype: dtype of the model, for `kv_cache_dtype="auto"`.
        device: device of the caches.

    Raises:
        ValueError: a group is missing from `num_blocks` or unknown.
    """
    if set(num_blocks) != set(get_args(CacheGroup)):
        raise ValueError(f"num_blocks has the groups {sorted(num_blocks)}; it needs {sorted(get_args(CacheGroup))}")
    cache_dtype = config.cache_dtype(dtype)

    def allocate(spec: CacheSpec) -> Tensor:
        shape = (num_blocks[spec.group], spec.rows, spec.width)
        return torch.zeros(shape, dtype=spec.dtype or cache_dtype, device=device)

    kinds = map(config.kind, range(config.num_hidden_layers))
    return [LayerCaches(**{s.name: allocate(s) for s in layer_cache_specs(config, kind)}) for kind in kinds]


def cache_bytes(caches: Sequence[LayerCaches]) -> int:
    """Bytes of all caches together."""
    tensors = (getattr(layer, field.name) for layer in caches for field in fields(layer))
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _state_spec(config: DeepseekV4Config, kind: LayerKind, name: str, width: int) -> CacheSpec:
    block_tokens = config.state_block_size(kind)
    return CacheSpec(
        name=name,
        group="c4_state" if kind is LayerKind.C4A else "c128_state",
        block_tokens=block_tokens,
        rows=block_tokens,
        width=2 * kind.overlap * width,
        dtype=torch.float32,
    )
