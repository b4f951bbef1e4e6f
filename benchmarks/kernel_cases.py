"""The calls that kernels are made for: each op at the sizes of the released models, on any device or on none.

On the device "meta" a call has shapes and no memory: enough to see what it would launch, and to compile that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4_compile.models.deepseek_v4 import DeepseekV4Config, LayerKind
from dsv4_compile.ops.cache_formats import (
    FP8,
    FP8_DS_MLA,
    FP8_DS_MLA_ALIGNMENT,
    MXFP4,
    PLAIN,
    page_bytes,
    row_bytes,
)
from dsv4_compile.ops.kernels.serve import NO_TRITON, KernelCall, Value, find_kernels

MODELS = {"Flash": DeepseekV4Config.flash(), "Pro": DeepseekV4Config.pro()}
DECODE_TOKENS = (1, 8, 64, 256)
PREFILL_TOKENS = 2048
CONTEXTS = (1024, 32768, 131072)
Arguments = dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of an op.

    Attributes:
        op: its name, without `dsv4::`.
        model: "Flash" or "Pro".
        variant: what the op does, for example the kind of layer.
        tokens: of the step.
        context: tokens of each request.
        heads: query heads on this device; the model's, or its share of them.
        cache_format: of the caches that the op reads or writes.
    """

    op: str
    model: str
    variant: str
    tokens: int
    context: int
    heads: int
    cache_format: str = PLAIN

    def arguments(self, device: str) -> Arguments:
        """Those of the op, in order; one request a token, or one request of all tokens in a prefill."""
        return _BUILDERS[self.op](self, MODELS[self.model], device)

    def call(self, device: str) -> KernelCall:
        """The call of the op's kernels; needs Triton."""
        make_call = find_kernels(self.op)
        if make_call is None:
            raise ModuleNotFoundError(NO_TRITON)
        return make_call(*self.arguments(device).values())

    @property
    def is_prefill(self) -> bool:
        """Whether all tokens are of one request."""
        return self.tokens == PREFILL_TOKENS


def _step(case: Case, device: str) -> tuple[Tensor, Tensor, int]:
    """Positions, requests and how many of these there are."""
    requests = 1 if case.is_prefill else case.tokens
    if device == "meta":
        positions = torch.empty(case.tokens, dtype=torch.int64, device=device)
        return positions, torch.empty(case.tokens, dtype=torch.int32, device=device), requests
    if case.is_prefill:
        positions = torch.arange(case.context - case.tokens, case.context, device=device).clamp(min=0)
        return positions, torch.zeros(case.tokens, dtype=torch.int32, device=device), requests
    positions = torch.full((case.tokens,), case.context - 1, device=device)
    return positions, torch.arange(case.tokens, dtype=torch.int32, device=device), requests


def _table(requests: int, blocks: int, device: str) -> Tensor:
    """Block tables in which no two requests share a block, in no order that a cache line could use."""
    if device == "meta":
        return torch.empty(requests, blocks, dtype=torch.int32, device=device)
    return torch.randperm(requests * blocks, device=device).to(torch.int32).view(requests, blocks)


def _rows(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _pages(case: Case, blocks: int, rows: int, width: int, device: str, rope: int = 0) -> Tensor:
    if case.cache_format == PLAIN:
        return torch.randn(blocks, rows, width, dtype=torch.bfloat16, device=device)
    bytes_a_row = row_bytes(case.cache_format, width, rope)
    page = page_bytes(rows, bytes_a_row, FP8_DS_MLA_ALIGNMENT)
    # codes of small numbers, and scales near 1: any byte below 128 is both
    memory = torch.randint(100, 128, (blocks, page), dtype=torch.uint8, device=device)
    return memory[:, : rows * bytes_a_row].view(blocks, rows, bytes_a_row)


def _ratio(case: Case) -> int:
    return {"SWA": 0, "C4A": 4, "C128A": 128}[case.variant]


def _forward_mqa(case: Case, config: DeepseekV4Config, device: str) -> Arguments:
    positions, token_to_req, requests = _step(case, device)
    ratio, width, rope = _ratio(case), config.head_dim, config.qk_rope_head_dim
    rows = config.compressed_block_size // max(ratio, 1)
    swa_blocks = -(-case.context // config.swa_block_size)
    kept = min(requests * swa_blocks, 4096)  # pages behind the window are given back
    blocks = -(-case.context // config.compressed_block_size)
    topk = None
    if ratio == 4:
        entries = case.context // ratio
        topk = torch.full((case.tokens, config.index_topk), -1, dtype=torch.int32, device=device)
        count = min(entries, config.index_topk)
        topk[:, :count] = torch.arange(count, dtype=torch.int32, device=device) * (entries // count)
    shape = (case.tokens, case.heads, width)
    return {
        "q": torch.randn(shape, dtype=torch.bfloat16, device=device),
        "attn_sink": torch.zeros(case.heads, device=device),
        "positions": positions,
        "token_to_req": token_to_req,
        "swa_cache": _pages(case, kept, config.swa_block_size, width, device, rope),
        "swa_block_table": _table(requests, swa_blocks, device) % kept,
        "kv_cache": _pages(case, requests * blocks, rows, width, device, rope) if ratio else None,
        "block_table": _table(requests, blocks, device) if ratio else None,
        "topk_indices": topk,
        "window": config.sliding_window,
        "ratio": ratio,
        "scale": width**-0.5,
        "out": torch.empty(shape, dtype=torch.bfloat16, device=device),
        "kv_cache_dtype": case.cache_format,
        "rope_dims": rope,
    }


def _sparse_indexer(case: Case, config: DeepseekV4Config, device: str) -> Arguments:
    positions, token_to_req, requests = _step(case, device)
    heads, width = config.index_n_heads, config.index_head_dim
    blocks = -(-case.context // config.compressed_block_size)
    queries, scales = _packed_queries(case, heads, width, device)
    return {
        "index_q": queries,
        "index_q_scale": scales,
        "index_weights": torch.randn(case.tokens, heads, device=device),
        "positions": positions,
        "k_cache": _pages(case, requests * blocks, config.compressed_block_size // 4, width, device),
        "token_to_req": token_to_req,
        "block_table": _table(requests, blocks, device),
        "ratio": 4,
        "topk_indices": torch.empty(case.tokens, config.index_topk, dtype=torch.int32, device=device),
        "index_cache_dtype": case.cache_format,
    }


def _packed_queries(case: Case, heads: int, width: int, device: str) -> tuple[Tensor, Tensor | None]:
    """Queries of the indexer in the format of its keys, and their scales."""
    if case.cache_format == MXFP4:
        codes = torch.randint(0, 128, (case.tokens, heads, width // 2), dtype=torch.uint8, device=device)
        return codes, torch.full((case.tokens, heads, 4), 127, dtype=torch.uint8, device=device)
    queries = _rows(device, case.tokens, heads, width)
    return (queries.to(torch.float8_e4m3fn), None) if case.cache_format == FP8 else (queries, None)


def _table_of_rope(case: Case, config: DeepseekV4Config, device: str) -> Tensor:
    return torch.randn(case.context, config.qk_rope_head_dim, device=device)


def _fused_q_kv_rmsnorm(case: Case, config: DeepseekV4Config, device: str) -> Arguments:
    q_lora, width = config.q_lora_rank, config.head_dim
    return {
        "qr_kv": _rows(device, case.tokens, q_lora + width),
        "q_weight": _rows(device, q_lora),
        "kv_weight": _rows(device, width),
        "eps": config.rms_norm_eps,
        "qr_out": _rows(device, case.tokens, q_lora),
        "kv_out": _rows(device, case.tokens, width),
    }


def _qnorm_rope_kv_insert(case: Case, config: DeepseekV4Config, device: str) -> Arguments:
    shape = (case.tokens, case.heads, config.head_dim)
    blocks = -(-case.tokens // config.swa_block_size)
    return {
        "q": _rows(device, *shape),
        "kv": _rows(device, case.tokens, config.head_dim),
        "positions": _step(case, device)[0],
        "cos_sin": _table_of_rope(case, config, device),
        "slot_mapping": torch.arange(case.tokens, device=device),
        "eps": config.rms_norm_eps,
        "q_out": _rows(device, *shape),
        "swa_cache": _pages(case, blocks, config.swa_block_size, config.head_dim, device, config.qk_rope_head_dim),
        "kv_cache_dtype": case.cache_format,
    }


def _compress_kv_insert(case: Case, config: DeepseekV4Config, device: str) -> Arguments:
    kind = LayerKind.C128A if case.variant == "C128A" else LayerKind.C4A
    width = config.index_head_dim if case.variant == "indexer" else config.head_dim
    positions, token_to_req, requests = _step(case, device)
    state_rows, channels = config.state_block_size(kind), kind.overlap * width
    state_blocks, blocks = -(-case.context // state_rows), -(-case.context // config.compressed_block_size)
    # as many entries as tokens close a block: the last token of each request does
    slots = torch.where((positions + 1) % kind.value == 0, torch.arange(case.tokens, device=device), -1)
    # the states of a window alone, whatever the context: they are all that is ever read
    kept = min(requests * state_blocks, 4096)
    rows = config.compressed_block_size // kind.value
    rope = config.qk_rope_head_dim if case.cache_format == FP8_DS_MLA else 0
    return {
        "kv_score": _rows(device, case.tokens, 2 * channels),
        "ape": torch.randn(kind.value, channels, device=device),
        "norm_weight": _rows(device, width),
        "positions": positions,
        "cos_sin": _table_of_rope(case, config, device),
        "token_to_req": token_to_req,
        "state_block_table": _table(requests, state_blocks, device) % kept,
        "state_slot_mapping": torch.arange(case.tokens, device=device),
        "slot_mapping": slots,
        "ratio": kind.value,
        "eps": config.rms_norm_eps,
        "state_cache": torch.randn(max(kept, -(-case.tokens // state_rows)), state_rows, 2 * channels, device=device),
        "kv_cache": _pages(case, max(blocks, case.tokens), rows, width, device, rope),
        "kv_cache_dtype": case.cache_format,
    }


def _indexer_q_rope(case: Case, config: DeepseekV4Config, device: str) -> Arguments:
    heads, width = config.index_n_heads, config.index_head_dim
    queries, scales = _packed_queries(case, heads, width, device)
    return {
        "index_q": _rows(device, case.tokens, heads, width),
        "weights": _rows(device, case.tokens, heads),
        "positions": _step(case, device)[0],
        "cos_sin": _table_of_rope(case, config, device),
        "scale": (heads * width) ** -0.5,
        "q_out": queries,
        "weights_out": torch.empty(case.tokens, heads, device=device),
        "q_scale_out": scales,
        "index_cache_dtype": case.cache_format,
    }


def _inverse_rope(case: Case, config: DeepseekV4Config, device: str) -> Arguments:
    shape = (case.tokens, case.heads, config.head_dim)
    return {
        "x": _rows(device, *shape),
        "positions": _step(case, device)[0],
        "cos_sin": _table_of_rope(case, config, device),
        "out": _rows(device, *shape),
    }


_BUILDERS: dict[str, Callable[[Case, DeepseekV4Config, str], Arguments]] = {
    "forward_mqa": _forward_mqa,
    "sparse_indexer": _sparse_indexer,
    "compress_kv_insert": _compress_kv_insert,
    "qnorm_rope_kv_insert": _qnorm_rope_kv_insert,
    "indexer_q_rope": _indexer_q_rope,
    "fused_q_kv_rmsnorm": _fused_q_kv_rmsnorm,
    "inverse_rope": _inverse_rope,
}
OPS = tuple(_BUILDERS)
VARIANTS = {
    "forward_mqa": ("SWA", "C4A", "C128A"),
    "compress_kv_insert": ("C4A", "indexer", "C128A"),
}


# formats other than plain rows of what an op reads or writes
FORMATS = {
    ("forward_mqa", "SWA"): (FP8_DS_MLA,),
    ("forward_mqa", "C4A"): (FP8_DS_MLA,),
    ("forward_mqa", "C128A"): (FP8_DS_MLA,),
    ("compress_kv_insert", "C4A"): (FP8_DS_MLA,),
    ("compress_kv_insert", "C128A"): (FP8_DS_MLA,),
    ("compress_kv_insert", "indexer"): (FP8, MXFP4),
    ("qnorm_rope_kv_insert", "C4A"): (FP8_DS_MLA,),
    ("sparse_indexer", "C4A"): (FP8, MXFP4),
    ("indexer_q_rope", "C4A"): (FP8, MXFP4),
}


def in_all_formats(case: Case) -> Iterator[Case]:
    """A case, and the same in each packed format that its op takes."""
    yield case
    yield from (replace(case, cache_format=packed) for packed in FORMATS.get((case.op, case.variant), ()))


def entry_bytes(case: Case) -> int:
    """Bytes of a row of the cache that an op reads or writes."""
    config = MODELS[case.model]
    is_index = case.op == "sparse_indexer" or case.variant == "indexer"
    width = config.index_head_dim if is_index else config.head_dim
    if case.cache_format == PLAIN:
        return 2 * width
    return row_bytes(case.cache_format, width, 0 if is_index else config.qk_rope_head_dim)


def compiled_cases() -> Iterator[Case]:
    """Cases that between them launch every specialisation of the released models, whole or with heads sharded."""
    for case in _plain_cases():
        yield from in_all_formats(case)


def _plain_cases() -> Iterator[Case]:
    for op in OPS:
        for variant in VARIANTS.get(op, ("C4A",)):
            for model in ("Flash",) if op in VARIANTS else MODELS:
                for heads in (16, 64) if op == "forward_mqa" else (64,):
                    for tokens in (1, PREFILL_TOKENS) if op == "forward_mqa" else (1,):
                        yield Case(op=op, model=model, variant=variant, tokens=tokens, context=131072, heads=heads)
