"""Whether caches are those a layer can work with, and in which formats they are.

A layer whose configuration names a format takes no other. Where it says "auto" the caches decide: plain rows, or a
packed format that their bytes a row tell. So one model can be served with caches of any format, one after the other.
"""

from __future__ import annotations

import torch

from ...ops.cache_formats import FP8, FP8_DS_MLA, MXFP4, PLAIN, row_bytes, why_not_laid_out
from .caches import CacheSpec, LayerCaches, layer_cache_specs
from .config import DeepseekV4Config, LayerKind


def with_formats_of(config: DeepseekV4Config, caches: LayerCaches) -> DeepseekV4Config:
    """The configuration with the packed formats of these caches where it leaves them open."""
    kv = FP8_DS_MLA if caches.swa_cache.dtype is torch.uint8 else None
    index = None
    if caches.indexer_k_cache is not None and caches.indexer_k_cache.dtype is torch.uint8:
        is_fp4 = caches.indexer_k_cache.shape[-1] == row_bytes(MXFP4, config.index_head_dim)
        index = MXFP4 if is_fp4 else FP8
    return config.with_cache_dtypes(
        kv if config.kv_cache_dtype == PLAIN else None, index if config.index_cache_dtype == PLAIN else None
    )


def why_not_caches_of(config: DeepseekV4Config, kind: LayerKind, caches: LayerCaches) -> str | None:
    """What is wrong with the caches of a layer, or None.

    Args:
        config: with formats, as from `with_formats_of`.
        kind: of the layer.
        caches: those that the kind has, each there.
    """
    reasons = (_why_not(config, spec, getattr(caches, spec.name)) for spec in layer_cache_specs(config, kind))
    return next(filter(None, reasons), None)


def _why_not(config: DeepseekV4Config, spec: CacheSpec, cache: torch.Tensor) -> str | None:
    cache_format, width, rope_dims = PLAIN, spec.width, 0
    asked = ""
    if spec.name in ("swa_cache", "kv_cache"):
        asked, cache_format = f" (kv_cache_dtype {config.kv_cache_dtype!r})", config.kv_format
        width, rope_dims = config.head_dim, config.qk_rope_head_dim
    elif spec.name == "indexer_k_cache":
        asked, cache_format = f" (index_cache_dtype {config.index_cache_dtype!r})", config.index_format
        width = config.index_head_dim
    if (reason := why_not_laid_out(cache, cache_format, width, rope_dims)) is not None:
        return f"{spec.name} is {reason}{asked}"
    if cache.shape[1] != spec.rows:
        return f"{spec.name} has blocks of {cache.shape[1]} rows and not {spec.rows}"
    if spec.dtype not in (None, cache.dtype):
        return f"{spec.name} is {cache.dtype} and not {spec.dtype}{asked}"
    return None
