"""The kernels of single rows (norms, RoPE, inserts) under the interpreter against the ops in torch."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import CONFIG, STEPS, Batch, needs_interpreter, run_both

from dsv4_compile.models.deepseek_v4 import LayerKind, build_cos_sin

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


@DTYPES
@pytest.mark.parametrize("step", CLOSING)
@pytest.mark.parametrize(("ratio", "width"), [(4, CONFIG.head_dim), (4, CONFIG.index_head_dim), (128, CONFIG.head_dim)])
def test_compress_kv_insert(step, ratio, width, dtype):
    batch = Batch(CLOSING[step])
    channels = (2 if ratio == 4 else 1) * width
    given = {
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
    check("compress_kv_insert", given, "state_cache", "kv_cache")
