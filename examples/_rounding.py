"""What transformers answers if its caches hold rounded numbers: what the packed cache formats are compared with.

Written from the formulae and without the ops of this package: nothing is packed, each number is put on the grid of its
format where transformers would store it, and goes on as a float. A scale is
s = 2^ceil(log2(max(amax, floor) / largest)) for each group of neighbours, and a value becomes round(x / s) * s.

    with rounded_caches("fp8_ds_mla", "mxfp4", rope_dims=64):
        original.generate(...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

_NOT_ROUNDED = ("auto", "float32")


@contextmanager
def rounded_caches(kv: str, index: str, rope_dims: int) -> Iterator[None]:
    """A block in which transformers' DeepSeek V4 rounds as caches of these formats do.

    Args:
        kv: "auto" or "float32" (nothing is rounded), "bf16" or "fp8_ds_mla": keys and values, raw and compressed.
        index: "auto" (as kv, unless that is packed), "float32", "bf16", "fp8" or "mxfp4": keys of the indexer, and in
            the last two its queries.
        rope_dims: the last dims of a key, which "fp8_ds_mla" keeps in bf16.
    """
    index = kv if index == "auto" and kv == "bf16" else index
    entry = {"compressor": lambda x: round_kv(x, kv, rope_dims), "indexer": lambda x: round_index(x, index)}
    append, score = theirs.DeepseekV4HCACache.update_compressor_states, theirs.DeepseekV4IndexerScorer.forward

    def append_rounded(self: Any, name: str, compressed: Tensor) -> Tensor:
        appended: Tensor = append(self, name, entry[name](compressed))
        return appended

    def score_rounded(self: Any, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scores: Tensor = score(self, q if index == "bf16" else round_index(q, index), *args, **kwargs)
        return scores

    with ExitStack() as stack:
        for cache in (DynamicSlidingWindowLayer, theirs.DeepseekV4HCACache):
            stack.enter_context(patch.object(cache, "update", _rounding_update(cache.update, entry["compressor"])))
        stack.enter_context(patch.object(theirs.DeepseekV4HCACache, "update_compressor_states", append_rounded))
        stack.enter_context(patch.object(theirs.DeepseekV4IndexerScorer, "forward", score_rounded))
        yield


def round_kv(x: Tensor, cache_format: str, rope_dims: int) -> Tensor:
    """A key [..., width] as the cache would give it back."""
    if cache_format in _NOT_ROUNDED:
        return x
    kept = x.to(torch.bfloat16)
    if cache_format == "fp8_ds_mla":
        plain = fake_fp8(kept[..., :-rope_dims], group=64)
        kept = torch.cat([plain.to(torch.bfloat16), kept[..., -rope_dims:]], dim=-1)
    return kept.to(x.dtype)


def round_index(x: Tensor, cache_format: str) -> Tensor:
    """A key or query of the indexer [..., width], as it enters the score."""
    if cache_format in _NOT_ROUNDED:
        return x
    kept = x.to(torch.bfloat16)
    if cache_format == "fp8":
        return fake_fp8(kept, group=x.shape[-1]).to(x.dtype)
    return (fake_fp4(kept, group=32) if cache_format == "mxfp4" else kept).to(x.dtype)


def fake_fp8(x: Tensor, group: int) -> Tensor:
    """float64 values of e4m3: 3 bits of mantissa, exponents from -6, at most 448."""
    return _fake(x, group, floor=1e-4, largest=448.0, mantissa=3, least_exponent=-6)


def fake_fp4(x: Tensor, group: int) -> Tensor:
    """float64 values of e2m1: 1 bit of mantissa, exponents from 0, at most 6."""
    return _fake(x, group, floor=6 * 2.0**-126, largest=6.0, mantissa=1, least_exponent=0)


def _fake(x: Tensor, group: int, *, floor: float, largest: float, mantissa: int, least_exponent: int) -> Tensor:
    parts = []
    for part in x.double().split(group, dim=-1):
        amax = part.abs().amax(dim=-1, keepdim=True)
        scale = 2 ** (amax.clamp(min=floor) / largest).log2().ceil()
        scaled = (part / scale).clamp(-largest, largest)
        step = 2.0 ** (torch.frexp(scaled).exponent - 1).clamp(min=least_exponent) * 2.0**-mantissa
        parts.append((scaled / step).round() * step * scale)  # a tie goes to the even one
    return torch.cat(parts, dim=-1)


def _rounding_update(update: Any, round_entry: Any) -> Any:
    def rounding(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(self, round_entry(key_states), round_entry(value_states), *args, **kwargs)

    return rounding
