"""The indexer's kernels under the interpreter: the selection of the op in torch, row for row, ties included."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import CONFIG, STEPS, Batch, make_call, needs_interpreter, run_both

pytestmark = needs_interpreter


def arguments(batch, *, exact=True, heads=16, count=None):
    """Numbers whose products and sums are exact, so that no order of summation can change a selection."""
    width = CONFIG.index_head_dim
    k_cache = batch.cache("compressed", width, 4)
    index_q = batch.randn(batch.tokens, heads, width)
    weights = batch.randn(batch.tokens, heads, dtype=torch.float32)
    if exact:
        k_cache, index_q, weights = k_cache.round(), index_q.round(), weights.round()
    count = CONFIG.index_topk if count is None else count
    return {
        "index_q": index_q,
        "index_q_scale": None,
        "index_weights": weights,
        "positions": batch.positions,
        "k_cache": k_cache,
        "token_to_req": batch.step.token_to_req,
        "block_table": batch.step.block_table,
        "ratio": 4,
        "topk_indices": torch.full((batch.tokens + 3, count), 77, dtype=torch.int32),
        "scratch": None,
    }


def packed(batch, given, cache_format):
    """The same queries and keys in a packed format, which takes integers as they are."""
    shape = given["index_q"].shape
    codes = {"fp8": (shape, torch.float8_e4m3fn), "mxfp4": ((*shape[:2], shape[2] // 2), torch.uint8)}[cache_format]
    queries, weights = torch.empty(codes[0], dtype=codes[1]), torch.empty(shape[:2])
    scales = torch.empty(*shape[:2], 4, dtype=torch.uint8) if cache_format == "mxfp4" else None
    table = torch.cat([torch.ones(400, 8), torch.zeros(400, 8)], dim=1)  # no rotation
    torch.ops.dsv4.indexer_q_rope(
        given["index_q"], given["index_weights"], batch.positions, table, 1.0, queries, weights, scales, cache_format
    )
    return given | {
        "index_q": queries,
        "index_q_scale": scales,
        "index_weights": weights,
        "k_cache": batch.packed(given["k_cache"], cache_format),
        "index_cache_dtype": cache_format,
    }


def check(given):
    [(actual, expected)] = run_both("sparse_indexer", given, "topk_indices")
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("count", [1, 12, 101])
def test_selects_what_the_op_in_torch_selects(step, count):
    check(arguments(Batch(STEPS[step]), count=count))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("cache_format", ["fp8", "mxfp4"])
@pytest.mark.parametrize("step", ["mixed", "long"])
def test_packed_keys_and_queries(step, cache_format, native, monkeypatch):
    module = pytest.importorskip("dsv4_compile.ops.kernels.sparse_indexer")
    monkeypatch.setattr(module, "HAVE_E4M3", ("sm_90",) if native else ())
    batch = Batch(STEPS[step])
    given = arguments(batch)
    sizes = 2.0 ** (torch.arange(given["k_cache"].shape[1]) % 5)  # with them all is exact still
    given["k_cache"] = given["k_cache"] * sizes.view(1, -1, 1).bfloat16()
    check(packed(batch, given, cache_format))


@pytest.mark.parametrize("heads", [1, 16, 20])
def test_any_number_of_heads(heads):
    check(arguments(Batch([(1, 253, 3)]), heads=heads))


def test_real_numbers_select_nearly_the_same():
    given = arguments(Batch(STEPS["long"]), exact=False)
    [(actual, expected)] = run_both("sparse_indexer", given, "topk_indices")
    same = [len(set(a) & set(b)) for a, b in zip(actual[:4].tolist(), expected[:4].tolist(), strict=True)]
    assert min(same) >= CONFIG.index_topk - 1


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_of_equal_scores_the_lower_block_wins(weight):
    given = arguments(Batch(STEPS["long"]))
    given["index_weights"].fill_(weight)
    given["k_cache"] = torch.where(given["k_cache"].isnan(), given["k_cache"], given["k_cache"].sign())
    check(given)


def test_zeros_of_both_signs_are_equal():
    given = arguments(Batch(STEPS["long"]))
    given["index_weights"][:, ::2] = -0.0
    given["index_weights"][:, 1::2] = 0.0
    check(given)


def test_a_short_context_reads_no_key():
    given = arguments(Batch(STEPS["mixed"]), count=101)
    given["k_cache"].fill_(float("nan"))
    check(given)


def test_blocks_that_are_not_allocated_are_not_selected():
    given = arguments(Batch([(1, 280, 6), (3, 380, 3)]))
    given["block_table"][1, 0] = -1
    check(given)


def test_little_scratch_takes_tokens_one_after_another():
    given = arguments(Batch(STEPS["mixed"]))
    columns, rows = given["block_table"].shape[1], given["k_cache"].shape[1]
    given["scratch"] = torch.full((3 * columns * rows + 5,), 77, dtype=torch.int32)
    assert len(list(make_call("sparse_indexer", given).launches())) == 2 * -(-given["index_q"].shape[0] // 3)
    check(given)


def test_many_scores_are_looked_at_in_parts(monkeypatch):
    module = pytest.importorskip("dsv4_compile.ops.kernels.sparse_indexer")
    monkeypatch.setattr(module, "SELECT_BLOCK", 32)
    check(arguments(Batch(STEPS["long"])))
    check(arguments(Batch(STEPS["pages"]), count=64))


def test_a_step_of_padding_alone_selects_nothing():
    check(arguments(Batch([], padding=3)))
