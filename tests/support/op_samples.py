"""Arguments for every `dsv4` op, built from one mixed step over shuffled blocks: two requests, one in the middle.

`sample(name)` gives named arguments; `pad(name, arguments, n)` appends n padded tokens whose values are poison.
Sizes are those of `tiny_config`, of which none divides another.
"""

from __future__ import annotations

from typing import Any

import torch
from paging import Paging, tiny_config
from torch import Tensor

from dsv4_compile.models.deepseek_v4 import LayerKind, StepState, build_cos_sin

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
    },
    "inverse_rope": {"x": float("nan"), "positions": None, "out": 7.0},
    "sparse_indexer": {"index_q": float("nan"), "index_weights": float("nan"), "positions": None, "token_to_req": -1},
    "forward_mqa": {"q": float("nan"), "positions": None, "token_to_req": -1, "out": 7.0},
}
VARIANTS = {
    "fused_q_kv_rmsnorm": ["main"],
    "qnorm_rope_kv_insert": ["main"],
    "compress_kv_insert": ["main_c4", "index_c4", "main_c128"],
    "indexer_q_rope": ["main"],
    "inverse_rope": ["main"],
    "sparse_indexer": ["scored", "everything"],
    "forward_mqa": ["swa", "c4", "c128"],
}
ALL = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


def make_step(seed: int = 0) -> tuple[Paging, Tensor, StepState]:
    paging = Paging(CONFIG, [40, 300, 9, 200], seed=seed)
    return paging, *paging.step(SPANS)


def op(name: str) -> Any:
    return getattr(torch.ops.dsv4, name).default


def sample(name: str, variant: str = "main", *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Arguments:
    return _BUILDERS[name](variant, dtype, torch.Generator().manual_seed(seed))


def pad(name: str, arguments: Arguments, count: int) -> Arguments:
    """The arguments with `count` padded tokens at the end; caches are cloned."""
    padded = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    for key, poison in PADDED[name].items():
        value = padded[key]
        tail = torch.full((count, *value.shape[1:]), 3 if poison is None else poison, dtype=value.dtype)
        padded[key] = torch.cat([value, tail])
    return padded


def _randn(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _fused_q_kv_rmsnorm(variant: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    q_lora, width = CONFIG.q_lora_rank, CONFIG.head_dim
    return {
        "qr_kv": _randn(g, NUM_TOKENS, q_lora + width, dtype=dtype),
        "q_weight": _randn(g, q_lora),
        "kv_weight": _randn(g, width),
        "eps": 1e-6,
        "qr_out": torch.full((NUM_TOKENS, q_lora), 7.0, dtype=dtype),
        "kv_out": torch.full((NUM_TOKENS, width), 7.0, dtype=dtype),
    }


def _qnorm_rope_kv_insert(variant: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
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
        "swa_cache": _randn(g, paging.num_blocks["swa"], CONFIG.swa_block_size, CONFIG.head_dim, dtype=dtype),
    }


def _compress_kv_insert(variant: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
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
        "kv_cache": _randn(g, paging.num_blocks["compressed"], rows, width, dtype=dtype),
    }


def _indexer_q_rope(variant: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    shape = (NUM_TOKENS, CONFIG.index_n_heads, CONFIG.index_head_dim)
    return {
        "index_q": _randn(g, *shape, dtype=dtype),
        "weights": _randn(g, *shape[:2], dtype=dtype),
        "positions": make_step()[1],
        "cos_sin": build_cos_sin(CONFIG, LayerKind.C4A),
        "scale": 0.03,
        "q_out": torch.full(shape, 7.0, dtype=dtype),
        "weights_out": torch.full(shape[:2], 7.0),
    }


def _inverse_rope(variant: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    shape = (NUM_TOKENS, CONFIG.num_attention_heads, CONFIG.head_dim)
    return {
        "x": _randn(g, *shape, dtype=dtype),
        "positions": make_step()[1],
        "cos_sin": build_cos_sin(CONFIG, LayerKind.SWA),
        "out": torch.full(shape, 7.0, dtype=dtype),
    }


def _sparse_indexer(variant: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    paging, positions, step = make_step()
    count = CONFIG.index_topk if variant == "scored" else 101
    rows = CONFIG.compressed_block_size // 4
    return {
        "index_q": _randn(g, NUM_TOKENS, CONFIG.index_n_heads, CONFIG.index_head_dim, dtype=dtype),
        "index_q_scale": None,
        "index_weights": _randn(g, NUM_TOKENS, CONFIG.index_n_heads),
        "positions": positions,
        "k_cache": _randn(g, paging.num_blocks["compressed"], rows, CONFIG.index_head_dim, dtype=dtype),
        "token_to_req": step.token_to_req,
        "block_table": step.block_table,
        "ratio": 4,
        "topk_indices": torch.full((NUM_TOKENS + 9, count), 77, dtype=torch.int32),
    }


def _forward_mqa(variant: str, dtype: torch.dtype, g: torch.Generator) -> Arguments:
    paging, positions, step = make_step()
    ratio = {"swa": 0, "c4": 4, "c128": 128}[variant]
    shape = (NUM_TOKENS, CONFIG.num_attention_heads, CONFIG.head_dim)
    swa_shape = (paging.num_blocks["swa"], CONFIG.swa_block_size, CONFIG.head_dim)
    kv_cache = topk = None
    if ratio:
        rows = CONFIG.compressed_block_size // ratio
        kv_cache = _randn(g, paging.num_blocks["compressed"], rows, CONFIG.head_dim, dtype=dtype)
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
        "swa_cache": _randn(g, *swa_shape, dtype=dtype),
        "swa_block_table": step.swa_block_table,
        "kv_cache": kv_cache,
        "block_table": step.block_table if ratio else None,
        "topk_indices": topk,
        "window": CONFIG.sliding_window,
        "ratio": ratio,
        "scale": CONFIG.head_dim**-0.5,
        "out": torch.full(shape, 7.0, dtype=dtype),
    }


_BUILDERS = {name: globals()[f"_{name}"] for name in VARIANTS}
