"""The paged caches of a model: what each layer kind needs, allocation, and binding to the layers.

Caches of one group share block tables and slot mappings, so a runner hands out blocks per group and not per layer.
They are bound as buffers, so that a compiler takes them for static inputs whose addresses stay.

A block is a page of memory, rounded up as kernels want it: to 576 bytes, a row of data, where keys and values are
`fp8_ds_mla`, and to 512 otherwise. That holds for every cache of a model, so that pages of different caches can come
from one allocator. What lies in a page is in `ops/cache_formats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from ...ops.cache_formats import (
    FP8_DS_MLA,
    FP8_DS_MLA_ALIGNMENT,
    PLAIN,
    PLAIN_ALIGNMENT,
    page_bytes,
    row_bytes,
)
from .config import DeepseekV4Config, LayerKind

CacheGroup = Literal["swa", "compressed", "c4_state", "c128_state"]


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """One cache of a layer, of shape [num_blocks, rows, width], contiguous within a block.

    Attributes:
        name: field of `LayerCaches`.
        group: caches of a group share block tables; one block covers the same tokens in all of them.
        block_tokens: tokens a block covers.
        rows: rows of a block: `block_tokens` over the compression ratio.
        width: elements of a row; bytes where it is packed.
        dtype: None means the dtype of the model.
        alignment: bytes that the distance between blocks is a multiple of.
    """

    name: str
    group: CacheGroup
    block_tokens: int
    rows: int
    width: int
    dtype: torch.dtype | None = None
    alignment: int = PLAIN_ALIGNMENT

    def page_bytes(self, model_dtype: torch.dtype) -> int:
        """Bytes from one block to the next, for a model of the given dtype."""
        return page_bytes(self.rows, self.width * (self.dtype or model_dtype).itemsize, self.alignment)


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
        width=_kv_width(config),
        dtype=config.kv_dtype,
        alignment=_alignment(config),
    )


def compressed_spec(config: DeepseekV4Config, kind: LayerKind) -> CacheSpec:
    """Compressed keys = values of C4A and C128A layers."""
    return CacheSpec(
        name="kv_cache",
        group="compressed",
        block_tokens=config.compressed_block_size,
        rows=config.compressed_block_size // kind.value,
        width=_kv_width(config),
        dtype=config.kv_dtype,
        alignment=_alignment(config),
    )


def indexer_k_spec(config: DeepseekV4Config) -> CacheSpec:
    """Compressed keys of the indexer of C4A layers."""
    return CacheSpec(
        name="indexer_k_cache",
        group="compressed",
        block_tokens=config.compressed_block_size,
        rows=config.compressed_block_size // LayerKind.C4A.value,
        width=_row_width(config.index_format, config.index_head_dim),
        dtype=config.index_dtype,
        alignment=_alignment(config),
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
    kv_cache_dtype: str | torch.dtype | None = None,
    index_cache_dtype: str | torch.dtype | None = None,
    num_layers: int | None = None,
) -> list[LayerCaches]:
    """Allocate zeroed caches for every layer.

    Args:
        config: sizes and layer kinds.
        num_blocks: blocks of each group: "swa", "compressed", "c4_state", "c128_state".
        dtype: dtype of the model, for `kv_cache_dtype="auto"`.
        device: device of the caches.
        kv_cache_dtype, index_cache_dtype: as of the configuration, whose own they replace.
        num_layers: how many layers; None: those of the model, without an MTP block, whose layer comes after them.

    Raises:
        ValueError: a group is missing from `num_blocks` or unknown.
        UnsupportedConfigError: no such format.
    """
    if set(num_blocks) != set(get_args(CacheGroup)):
        raise ValueError(f"num_blocks has the groups {sorted(num_blocks)}; it needs {sorted(get_args(CacheGroup))}")
    config = config.with_cache_dtypes(kv_cache_dtype, index_cache_dtype)

    def allocate(spec: CacheSpec) -> Tensor:
        return _zero_pages(spec, num_blocks[spec.group], dtype, device)

    kinds = map(config.kind, range(config.num_hidden_layers if num_layers is None else num_layers))
    return [LayerCaches(**{s.name: allocate(s) for s in layer_cache_specs(config, kind)}) for kind in kinds]


def cache_bytes(caches: Sequence[LayerCaches]) -> int:
    """Bytes of all caches together, whole pages."""
    tensors = (getattr(layer, field.name) for layer in caches for field in fields(layer))
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)


def bytes_per_token(config: DeepseekV4Config, model_dtype: torch.dtype = torch.bfloat16) -> float:
    """Bytes of all layers that one more token of a long request takes: its share of the pages that are never freed.

    Windows and compressor states are freed behind it, so they take a fixed amount for each request and none here.
    """
    specs = [s for i in range(config.num_hidden_layers) for s in layer_cache_specs(config, config.kind(i))]
    return sum(s.page_bytes(model_dtype) / s.block_tokens for s in specs if s.group == "compressed")


def _zero_pages(
    spec: CacheSpec, num_blocks: int, model_dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """[num_blocks, rows, width] over whole pages. No view: a compiler would look at the tensor it is a view of."""
    dtype = spec.dtype or model_dtype
    page = spec.page_bytes(model_dtype) // dtype.itemsize
    pages = torch.zeros(num_blocks, page, dtype=dtype, device=device)
    cache = torch.empty(0, dtype=dtype, device=device)
    return cache.set_(pages.untyped_storage(), 0, (num_blocks, spec.rows, spec.width), (page, spec.width, 1))


def _state_spec(config: DeepseekV4Config, kind: LayerKind, name: str, width: int) -> CacheSpec:
    block_tokens = config.state_block_size(kind)
    return CacheSpec(
        name=name,
        group="c4_state" if kind is LayerKind.C4A else "c128_state",
        block_tokens=block_tokens,
        rows=block_tokens,
        width=2 * kind.overlap * width,
        dtype=torch.float32,
        alignment=_alignment(config),
    )


def _kv_width(config: DeepseekV4Config) -> int:
    return _row_width(config.kv_format, config.head_dim, config.qk_rope_head_dim)


def _row_width(cache_format: str, width: int, rope_dims: int = 0) -> int:
    return width if cache_format == PLAIN else row_bytes(cache_format, width, rope_dims)


def _alignment(config: DeepseekV4Config) -> int:
    return FP8_DS_MLA_ALIGNMENT if config.kv_format == FP8_DS_MLA else PLAIN_ALIGNMENT
