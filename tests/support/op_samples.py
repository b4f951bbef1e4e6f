"""Arguments for every `dsv4` op, built from one mixed step over shuffled blocks: two requests, one in the middle.

`sample(name)` gives named arguments; `pad(name, arguments, n)` appends n padded tokens whose values are poison.
Sizes are those of `tiny_config`, of which none divides another. Packed caches have pages with unused bytes at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from paging import Paging, tiny_config
from torch import Tensor

from dsv4_compile.models.deepseek_v4 import LayerKind, StepState, build_cos_sin
from dsv4_compile.ops._quantise import quantise_e4m3
from dsv4_compile.ops.cache_formats import FP8, MXFP4, PLAIN, insert_entries, pack, page_bytes, row_bytes, row_parts

CONFIG = tiny_config(ratios=(0, 4, 128))
SPANS = [(1, 253, 6), (0, 0, 5), (3, 126, 3)]
NUM_TOKENS = 14
Arguments = dict[str, Any]

# arguments with one row a token, and what a padded row of them holds; None: anything in range
PADDED: dict[str, dict[str, float | None]] = {
    "fused_q_kv_rmsnorm": {"qr_kv": float("nan"), "qr_out": 7.0, "kv_out": 7.0},
    "qnorm_rope_kv_insert": {
        "q": float("nan"),
        "kv": float("nan"),
        "positions": None,
        "slot_mapping": -1,
        "q_out": 7.0,
    },
    "compress_kv_insert": {
        "kv_score": float("nan"),
        "positions": None,
        "token_to_req": -1,
        "state_slot_mapping": -1,
        "slot_mapping": -1,
    },
    "indexer_q_rope": {
        "index_q": float("nan"),
        "weights": float("nan"),
        "positions": None,
        "q_out": 7.0,
        "weights_out": 7.0,
        "q_scale_out": 7.0,
    },
    "inverse_rope": {"x": float("nan"), "positions": None, "out": 7.0},
    "sparse_indexer": {
        "index_q": float("nan"),
        "index_q_scale": float("nan"),
        "index_weights": float("nan"),
        "positions": None,
        "token_to_req": -1,
    },
    "forward_mqa": {"q": float("nan"), "positions": None, "token_to_req": -1, "out": 7.0},
}
VARIANTS = {
    "fused_q_kv_rmsnorm": ["main"],
    "qnorm_rope_kv_insert": ["main", "main fp8_ds_mla"],
    "compress_kv_insert": [
        *("main_c4", "index_c4", "main_c128"),
        *("main_c4 fp8_ds_mla", "index_c4 fp8", "index_c4 mxfp4", "main_c128 fp8_ds_mla"),
    ],
    "indexer_q_rope": ["main", "main fp8", "main mxfp4"],
    "inverse_rope": ["main"],
    "sparse_indexer": ["scored", "everything", "scored fp8", "everything fp8", "scored mxfp4"],
    "forward_mqa": ["swa", "c4", "c128", "swa fp8_ds_mla", "c4 fp8_ds_mla", "c128 fp8_ds_mla"],
}
ALL = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


def make_step(seed: int = 0) -> tuple[Paging, Tensor, StepState]:
    paging = Paging(CONFIG, [40, 300, 9, 200], seed=seed)
    return paging, *paging.step(SPANS)


def op(name: str) -> Any:
    return getattr(torch.ops.dsv4, name).default


def sample(name: str, variant: str = "main", *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Arguments:
    """Arguments of a variant: "what", or "what format" of the cache."""
    what, _, cache_format = variant.partition(" ")
    return _BUILDERS[name](what, cache_format or PLAIN, dtype, torch.Generator().manual_seed(seed))


def pad(name: str, arguments: Arguments, count: int) -> Arguments:
    """The arguments with `count` padded tokens at the end; caches are cloned."""
    padded = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    for key, value in token_rows(name, arguments).items():
        poison = PADDED[name][key]
        if poison != poison and value.dtype is torch.uint8:
            poison = 255
        tail = torch.full((count, *value.shape[1:]), 3 if poison is None else poison, dtype=value.dtype)
        padded[key] = torch.cat([value, tail])
    return padded


def token_rows(name: str, arguments: Arguments) -> dict[str, Tensor]:
    """The arguments that have a row a token."""
    return {key: arguments[key] for key in PADDED[name] if arguments.get(key) is not None}


def _cache(
    generator: torch.Generator,
    blocks: int,
    rows: int,
    width: int,
    cache_format: str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A cache of random entries; packed ones are padded to pages of an odd length."""
    entries = _randn(generator, blocks, rows, width, dtype=dtype)
    if cache_format == PLAIN:
        return entries
    rope_dims = CONFIG.qk_rope_head_dim
    bytes_a_row = row_bytes(cache_format, width, rope_dims)
    pages = torch.full((blocks, page_bytes(rows, bytes_a_row, 576)), 255, dtype=torch.uint8)
    cache = pages[:, : rows * bytes_a_row].unflatten(1, (rows, bytes_a_row))
    insert_entries(cache, torch.arange(blocks * rows), entries.flatten(0, 1), cache_format, rope_dims)
    return cache


def _randn(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _fused_q_kv_rmsnorm(variant: str, cache_format: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    q_lora, width = CONFIG.q_lora_rank, CONFIG.head_dim
    return {
        "qr_kv": _randn(g, NUM_TOKENS, q_lora + width, dtype=dtype),
        "q_weight": _randn(g, q_lora),
        "kv_weight": _randn(g, width),
        "eps": 1e-6,
        "qr_out": torch.full((NUM_TOKENS, q_lora), 7.0, dtype=dtype),
        "kv_out": torch.full((NUM_TOKENS, width), 7.0, dtype=dtype),
    }


def _qnorm_rope_kv_insert(variant: str, cache_format: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    paging, positions, step = make_step()
    shape = (NUM_TOKENS, CONFIG.num_attention_heads, CONFIG.head_dim)
    return {
        "q": _randn(g, *shape, dtype=dtype),
        "kv": _randn(g, NUM_TOKENS, CONFIG.head_dim, dtype=dtype),
        "positions": positions,
        "cos_sin": build_cos_sin(CONFIG, LayerKind.SWA),
        "slot_mapping": step.swa_slot_mapping,
        "eps": 1e-6,
        "q_out": torch.full(shape, 7.0, dtype=dtype),
        "swa_cache": _cache(g, paging.num_blocks["swa"], CONFIG.swa_block_size, CONFIG.head_dim, cache_format, dtype),
        "kv_cache_dtype": cache_format,
    }


def _compress_kv_insert(variant: str, cache_format: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    paging, positions, step = make_step()
    kind = LayerKind.C128A if variant == "main_c128" else LayerKind.C4A
    width = CONFIG.index_head_dim if variant == "index_c4" else CONFIG.head_dim
    channels, group = kind.overlap * width, f"c{kind.value}_state"
    rows = CONFIG.compressed_block_size // kind.value
    return {
        "kv_score": _randn(g, NUM_TOKENS, 2 * channels, dtype=dtype),
        "ape": _randn(g, kind.value, channels),
        "norm_weight": _randn(g, width),
        "positions": positions,
        "cos_sin": build_cos_sin(CONFIG, kind),
        "token_to_req": step.token_to_req,
        "state_block_table": paging.table(group),
        "state_slot_mapping": getattr(step, f"{group}_slot_mapping"),
        "slot_mapping": getattr(step, f"c{kind.value}_slot_mapping"),
        "ratio": kind.value,
        "eps": 1e-6,
        "state_cache": _randn(g, paging.num_blocks[group], CONFIG.state_block_size(kind), 2 * channels),
        "kv_cache": _cache(g, paging.num_blocks["compressed"], rows, width, cache_format, dtype),
        "kv_cache_dtype": cache_format,
    }


def _indexer_q_rope(variant: str, cache_format: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    shape = (NUM_TOKENS, CONFIG.index_n_heads, CONFIG.index_head_dim)
    return {
        "index_q": _randn(g, *shape, dtype=dtype),
        "weights": _randn(g, *shape[:2], dtype=dtype),
        "positions": make_step()[1],
        "cos_sin": build_cos_sin(CONFIG, LayerKind.C4A),
        "scale": 0.03,
        "q_out": torch.full(shape, 7.0, dtype=torch.float8_e4m3fn if cache_format == FP8 else dtype),
        "weights_out": torch.full(shape[:2], 7.0),
        "index_cache_dtype": cache_format,
        **_fp4_outputs(cache_format),
    }


def _fp4_outputs(cache_format: str) -> Arguments:
    if cache_format != MXFP4:
        return {"q_scale_out": None}
    width = CONFIG.index_head_dim
    shapes = {"q_out": width // 2, "q_scale_out": row_parts(MXFP4, width)[1]}
    heads = (NUM_TOKENS, CONFIG.index_n_heads)
    return {key: torch.full((*heads, count), 7, dtype=torch.uint8) for key, count in shapes.items()}


def _inverse_rope(variant: str, cache_format: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    shape = (NUM_TOKENS, CONFIG.num_attention_heads, CONFIG.head_dim)
    return {
        "x": _randn(g, *shape, dtype=dtype),
        "positions": make_step()[1],
        "cos_sin": build_cos_sin(CONFIG, LayerKind.SWA),
        "out": torch.full(shape, 7.0, dtype=dtype),
    }


def _sparse_indexer(variant: str, cache_format: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    paging, positions, step = make_step()
    count = CONFIG.index_topk if variant == "scored" else 101
    rows = CONFIG.compressed_block_size // 4
    queries = _randn(g, NUM_TOKENS, CONFIG.index_n_heads, CONFIG.index_head_dim, dtype=dtype)
    scales = None
    if cache_format == FP8:
        queries = quantise_e4m3(queries, CONFIG.index_head_dim)[0]
    if cache_format == MXFP4:
        queries, scales = pack(queries, MXFP4)
    return {
        "index_q": queries,
        "index_q_scale": scales,
        "index_weights": _randn(g, NUM_TOKENS, CONFIG.index_n_heads),
        "positions": positions,
        "k_cache": _cache(g, paging.num_blocks["compressed"], rows, CONFIG.index_head_dim, cache_format, dtype),
        "token_to_req": step.token_to_req,
        "block_table": step.block_table,
        "ratio": 4,
        "topk_indices": torch.full((NUM_TOKENS + 9, count), 77, dtype=torch.int32),
        "index_cache_dtype": cache_format,
    }


def _forward_mqa(variant: str, cache_format: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    paging, positions, step = make_step()
    ratio = {"swa": 0, "c4": 4, "c128": 128}[variant]
    shape = (NUM_TOKENS, CONFIG.num_attention_heads, CONFIG.head_dim)
    kv_cache = topk = None
    if ratio:
        rows = CONFIG.compressed_block_size // ratio
        kv_cache = _cache(g, paging.num_blocks["compressed"], rows, CONFIG.head_dim, cache_format, dtype)
    if ratio == 4:
        topk = torch.full((NUM_TOKENS + 9, CONFIG.index_topk), -1, dtype=torch.int32)
        for token, position in enumerate(positions.tolist()):
            chosen = torch.randperm((position + 1) // 4, generator=g)[: CONFIG.index_topk]
            # a hole in the middle must be skipped like one at the end
            topk[token, torch.randperm(CONFIG.index_topk, generator=g)[: len(chosen)]] = chosen.to(torch.int32)
    return {
        "q": _randn(g, *shape, dtype=dtype),
        "attn_sink": _randn(g, CONFIG.num_attention_heads),
        "positions": positions,
        "token_to_req": step.token_to_req,
        "swa_cache": _cache(g, paging.num_blocks["swa"], CONFIG.swa_block_size, CONFIG.head_dim, cache_format, dtype),
        "swa_block_table": step.swa_block_table,
        "kv_cache": kv_cache,
        "block_table": step.block_table if ratio else None,
        "topk_indices": topk,
        "window": CONFIG.sliding_window,
        "ratio": ratio,
        "scale": CONFIG.head_dim**-0.5,
        "out": torch.full(shape, 7.0, dtype=dtype),
        "kv_cache_dtype": cache_format,
        "rope_dims": CONFIG.qk_rope_head_dim,
    }


_BUILDERS = {name: globals()[f"_{name}"] for name in VARIANTS}
