"""The attention kernel under the interpreter against the op in torch."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import CONFIG, STEPS, Batch, make_call, needs_interpreter, run_both

pytestmark = needs_interpreter
VARIANTS = pytest.mark.parametrize("ratio", [0, 4, 128])


def arguments(batch, ratio, *, heads=6, holes=False):
    width = CONFIG.head_dim
    topk = None
    if ratio == 4:
        topk = torch.full((batch.tokens + 3, CONFIG.index_topk), -1, dtype=torch.int32)
        for token, position in enumerate(batch.positions.tolist()):
            if batch.step.token_to_req[token] >= 0:
                chosen = torch.randperm((position + 1) // 4, generator=batch.generator)[: CONFIG.index_topk]
                places = torch.randperm(CONFIG.index_topk)[: len(chosen)] if holes else torch.arange(len(chosen))
                topk[token, places] = chosen.sort().values.to(torch.int32)
    return {
        "q": batch.randn(batch.tokens, heads, width),
        "attn_sink": batch.randn(heads, dtype=torch.float32),
        "positions": batch.positions,
        "token_to_req": batch.step.token_to_req,
        "swa_cache": batch.cache("swa", width),
        "swa_block_table": batch.step.swa_block_table,
        "kv_cache": batch.cache("compressed", width, ratio) if ratio else None,
        "block_table": batch.step.block_table if ratio else None,
        "topk_indices": topk,
        "window": CONFIG.sliding_window,
        "ratio": ratio,
        "scale": width**-0.5,
        "out": torch.full((batch.tokens, heads, width), 7.0, dtype=torch.bfloat16),
        "scratch": None,
    }


def check(given, *, padding=2):
    [(actual, expected)] = run_both("forward_mqa", given, "out")
    assert (actual[actual.shape[0] - padding :] == 0).all()
    # weights are rounded to bf16, 2**-9 of values of up to 4, and so is the result
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-6)
    return actual


@VARIANTS
@pytest.mark.parametrize("step", STEPS)
def test_equals_the_op_in_torch(ratio, step):
    check(arguments(Batch(STEPS[step]), ratio))


@VARIANTS
@pytest.mark.parametrize("heads", [1, 16, 33])
def test_any_number_of_heads(ratio, heads):
    check(arguments(Batch([(1, 40, 2)]), ratio, heads=heads))


@VARIANTS
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_shares_add_up_to_the_whole(ratio, splits, monkeypatch):
    module = pytest.importorskip("dsv4_compile.ops.kernels.forward_mqa")
    monkeypatch.setattr(module, "choose_splits", lambda programs, tiles: splits)
    check(arguments(Batch(STEPS["long"]), ratio))


def test_holes_in_a_selection_are_skipped():
    check(arguments(Batch(STEPS["mixed"]), 4, holes=True))


@VARIANTS
def test_a_step_of_padding_alone_writes_zeros(ratio):
    check(arguments(Batch([], padding=3), ratio), padding=3)


@VARIANTS
def test_scratch_of_the_caller_is_used_and_its_contents_mean_nothing(ratio):
    batch = Batch(STEPS["long"])
    given = arguments(batch, ratio)
    given["scratch"] = torch.full((4 * 16 * 6 * 66 * 3,), float("nan"))
    *_, partials = make_call("forward_mqa", given).launches()
    if partials.kernel.__name__ == "combine_splits":
        assert partials.arguments[0].data_ptr() == given["scratch"].data_ptr()
    check(given)


@VARIANTS
def test_a_head_without_a_sink(ratio):
    given = arguments(Batch(STEPS["mixed"]), ratio)
    given["attn_sink"][:2] = float("-inf")
    check(given)


def test_pages_may_be_longer_than_their_rows():
    given = arguments(Batch(STEPS["mixed"]), 4)
    for name in ("swa_cache", "kv_cache"):
        blocks, rows, width = given[name].shape
        longer = torch.full((blocks, rows * width + 80), float("nan"), dtype=torch.bfloat16)
        longer[:, : rows * width] = given[name].flatten(1)
        given[name] = longer[:, : rows * width].view(blocks, rows, width)
    check(given)


def test_blocks_that_are_not_allocated_have_no_keys():
    given = arguments(Batch([(1, 253, 6), (3, 126, 3)]), 4)
    given["swa_block_table"][1, :15] = -1
    given["block_table"][1, 0] = -1
    check(given)


@VARIANTS
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("step", ["mixed", "long"])
def test_fp8_caches(ratio, step, native, monkeypatch):
    module = pytest.importorskip("dsv4_compile.ops.kernels.forward_mqa")
    monkeypatch.setattr(module, "HAVE_E4M3", ("sm_90",) if native else ())
    batch = Batch(STEPS[step])
    given = arguments(batch, ratio)
    for name in ("swa_cache", "kv_cache"):
        if given[name] is not None:
            # scales of many sizes
            cache = given[name] * torch.logspace(-3, 1, given[name].shape[1]).view(1, -1, 1).bfloat16()
            given[name] = batch.packed(cache, "fp8_ds_mla", CONFIG.qk_rope_head_dim)
    given |= {"kv_cache_dtype": "fp8_ds_mla", "rope_dims": CONFIG.qk_rope_head_dim}
    check(given)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.zeros(3, 2, 64)}, "q is torch.float32, and the kernel takes torch.bfloat16"),
        (
            {"q": torch.zeros(3, 2, 20, dtype=torch.bfloat16)},
            "head_dim is 20, and the kernel takes powers of two from 16",
        ),
        ({"q": torch.zeros(2, 3, 64, dtype=torch.bfloat16).transpose(0, 1)}, "q is not contiguous"),
        (
            {"swa_cache": torch.zeros(3, 64, 16, dtype=torch.bfloat16).transpose(1, 2)},
            "the pages of swa_cache are not contiguous",
        ),
        (
            {"swa_cache": torch.zeros(3, 16, 32, dtype=torch.bfloat16)},
            "swa_cache is torch.bfloat16 [3, 16, 32]; 'auto' ",
        ),
        ({"kv_cache_dtype": "fp8"}, "the cache format is 'fp8'"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "'fp8_ds_mla' entries of 64 values take"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions has 2 rows, of 3 tokens"),
    ],
)
def test_what_does_not_fit_has_a_reason(change, reason):
    assert reason in make_call("forward_mqa", arguments(Batch(STEPS["one token"]), 0) | change).why_not()
