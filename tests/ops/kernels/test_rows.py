"""The kernels of single rows (norms, RoPE, inserts) under the interpreter against the ops in torch."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import CONFIG, STEPS, Batch, needs_interpreter, run_both

from dsv4_compile.models.deepseek_v4 import LayerKind, build_cos_sin
from dsv4_compile.ops.cache_formats import gather_entries

pytestmark = needs_interpreter
HEADS = 11
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
STEP = pytest.mark.parametrize("step", STEPS)


def check(name, given, *written):
    for actual, expected in run_both(name, given, *written):
        # fp32 inside, so a bf16 result may be its neighbour
        rtol = 2**-7 if actual.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-5, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("widths", [(28, 64), (48, 20), (1024, 512)])
def test_fused_q_kv_rmsnorm(widths, dtype):
    batch = Batch(STEPS["mixed"])
    given = {
        "qr_kv": batch.randn(batch.tokens, sum(widths), dtype=dtype),
        "q_weight": batch.randn(widths[0], dtype=dtype),
        "kv_weight": batch.randn(widths[1], dtype=torch.float32),
        "eps": 1e-6,
        "qr_out": torch.full((batch.tokens, widths[0]), 7.0, dtype=dtype),
        "kv_out": torch.full((batch.tokens, widths[1]), 7.0, dtype=dtype),
    }
    check("fused_q_kv_rmsnorm", given, "qr_out", "kv_out")


@DTYPES
@STEP
def test_qnorm_rope_kv_insert(step, dtype):
    batch = Batch(STEPS[step])
    given = {
        "q": batch.randn(batch.tokens, HEADS, CONFIG.head_dim, dtype=dtype),
        "kv": batch.randn(batch.tokens, CONFIG.head_dim, dtype=dtype),
        "positions": batch.positions,
        "cos_sin": build_cos_sin(CONFIG, LayerKind.SWA),
        "slot_mapping": batch.step.swa_slot_mapping,
        "eps": 1e-6,
        "q_out": torch.full((batch.tokens, HEADS, CONFIG.head_dim), 7.0, dtype=dtype),
        "swa_cache": batch.cache("swa", CONFIG.head_dim, dtype=dtype),
    }
    check("qnorm_rope_kv_insert", given, "q_out", "swa_cache")


def odd(x):
    """With zeros, subnormals, huge numbers and powers of two, where scales and ties are decided."""
    flat = x.flatten(0, -2)
    for row, factor in enumerate([0.0, 1e-30, 1e-6, 2.0, 448.0, 1e4, 1e30]):
        flat[row % len(flat)] *= factor
    x[-1] = (x[-1] * 4).round() / 4
    return x


@DTYPES
@pytest.mark.parametrize("step", ["mixed", "window"])
def test_qnorm_rope_kv_insert_into_fp8(step, dtype):
    batch = Batch(STEPS[step])
    shape = (batch.tokens, HEADS, CONFIG.head_dim)
    given = {
        "q": batch.randn(*shape, dtype=dtype),
        "kv": odd(batch.randn(batch.tokens, CONFIG.head_dim, dtype=dtype)),
        "positions": batch.positions,
        "cos_sin": build_cos_sin(CONFIG, LayerKind.SWA),
        "slot_mapping": batch.step.swa_slot_mapping,
        "eps": 1e-6,
        "q_out": torch.full(shape, 7.0, dtype=dtype),
        "swa_cache": batch.packed(batch.cache("swa", CONFIG.head_dim), "fp8_ds_mla", CONFIG.qk_rope_head_dim),
        "kv_cache_dtype": "fp8_ds_mla",
    }
    [(actual, expected)] = run_both("qnorm_rope_kv_insert", given, "swa_cache")
    assert torch.equal(actual, expected)  # bit for bit: neither norm nor sums come before


@DTYPES
@STEP
def test_indexer_q_rope(step, dtype):
    batch = Batch(STEPS[step])
    given = {
        "index_q": batch.randn(batch.tokens, HEADS, CONFIG.index_head_dim, dtype=dtype),
        "weights": batch.randn(batch.tokens, HEADS, dtype=dtype),
        "positions": batch.positions,
        "cos_sin": build_cos_sin(CONFIG, LayerKind.C4A),
        "scale": 0.03,
        "q_out": torch.full((batch.tokens, HEADS, CONFIG.index_head_dim), 7.0, dtype=dtype),
        "weights_out": torch.full((batch.tokens, HEADS), 7.0),
    }
    check("indexer_q_rope", given, "q_out", "weights_out")


@DTYPES
@pytest.mark.parametrize("cache_format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("width", [32, 128])
def test_indexer_q_rope_packs(cache_format, width, dtype):
    batch = Batch(STEPS["mixed"])
    shape = (batch.tokens, HEADS, width)
    codes = torch.full(shape, 7.0).to(torch.float8_e4m3fn)
    given = {
        "index_q": odd(batch.randn(*shape, dtype=dtype)),
        "weights": batch.randn(*shape[:2], dtype=dtype),
        "positions": batch.positions,
        "cos_sin": build_cos_sin(CONFIG, LayerKind.C4A),
        "scale": 0.03,
        "q_out": codes if cache_format == "fp8" else torch.full((*shape[:2], width // 2), 7, dtype=torch.uint8),
        "weights_out": torch.full(shape[:2], 7.0),
        "q_scale_out": None if cache_format == "fp8" else torch.full((*shape[:2], 4), 7, dtype=torch.uint8),
        "index_cache_dtype": cache_format,
    }
    written = ("q_out", "weights_out") if cache_format == "fp8" else ("q_out", "weights_out", "q_scale_out")
    for actual, expected in run_both("indexer_q_rope", given, *written):
        if actual.dtype is torch.float32:
            torch.testing.assert_close(actual, expected)
        else:
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@DTYPES
@STEP
def test_inverse_rope(step, dtype):
    batch = Batch(STEPS[step])
    given = {
        "x": batch.randn(batch.tokens, HEADS, CONFIG.head_dim, dtype=dtype),
        "positions": batch.positions,
        "cos_sin": build_cos_sin(CONFIG, LayerKind.C128A),
        "out": torch.full((batch.tokens, HEADS, CONFIG.head_dim), 7.0, dtype=dtype),
    }
    check("inverse_rope", given, "out")


CLOSING = {
    "nothing closes": [(0, 0, 3), (1, 129, 1)],
    "first blocks": [(0, 0, 9), (1, 124, 4), (3, 3, 1)],
    "at once": [(1, 255, 1), (3, 383, 1), (0, 127, 1)],
    "mixed": STEPS["mixed"],
}


def compress_arguments(batch, ratio, width, dtype):
    channels = (2 if ratio == 4 else 1) * width
    return {
        "kv_score": batch.randn(batch.tokens, 2 * channels, dtype=dtype),
        "ape": batch.randn(ratio, channels, dtype=torch.float32),
        "norm_weight": batch.randn(width, dtype=torch.float32),
        "positions": batch.positions,
        "cos_sin": build_cos_sin(CONFIG, LayerKind(ratio)),
        "token_to_req": batch.step.token_to_req,
        "state_block_table": getattr(batch.step, f"c{ratio}_state_block_table"),
        "state_slot_mapping": getattr(batch.step, f"c{ratio}_state_slot_mapping"),
        "slot_mapping": getattr(batch.step, f"c{ratio}_slot_mapping"),
        "ratio": ratio,
        "eps": 1e-6,
        "state_cache": batch.cache(f"c{ratio}_state", 2 * channels, dtype=torch.float32),
        "kv_cache": batch.cache("compressed", width, ratio, dtype=dtype),
    }


@DTYPES
@pytest.mark.parametrize("step", CLOSING)
@pytest.mark.parametrize(("ratio", "width"), [(4, CONFIG.head_dim), (4, CONFIG.index_head_dim), (128, CONFIG.head_dim)])
def test_compress_kv_insert(step, ratio, width, dtype):
    given = compress_arguments(Batch(CLOSING[step]), ratio, width, dtype)
    check("compress_kv_insert", given, "state_cache", "kv_cache")


FORMATS = {"fp8_ds_mla": (4, CONFIG.head_dim), "fp8": (4, CONFIG.index_head_dim), "mxfp4": (4, CONFIG.index_head_dim)}


@pytest.mark.parametrize("step", ["first blocks", "mixed"])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_compress_kv_insert_into_packed_pages(cache_format, step):
    ratio, width = FORMATS[cache_format]
    rope = CONFIG.qk_rope_head_dim if cache_format == "fp8_ds_mla" else 0
    batch = Batch(CLOSING[step])
    plain = batch.cache("compressed", width, ratio)
    given = compress_arguments(batch, ratio, width, torch.bfloat16) | {
        "kv_cache": batch.packed(plain, cache_format, rope),
        "kv_cache_dtype": cache_format,
    }
    [(actual, expected)] = run_both("compress_kv_insert", given, "kv_cache")
    # a sum in another order may end at the next bf16, and that at the next code
    differing = (actual != expected).float().mean()
    assert differing < 0.002
    slots = batch.step.c4_slot_mapping
    values, wanted = (gather_entries(cache, slots, width, cache_format, rope) for cache in (actual, expected))
    torch.testing.assert_close(values, wanted, rtol=0.34 if cache_format == "mxfp4" else 2**-3, atol=1e-3)
