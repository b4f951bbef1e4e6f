"""Plans of the three layer kinds under each runner and policy, to be read beside the definition of the policies.

narrow (mrv2): the region holds `sparse_indexer` and `forward_mqa` and nothing else.
wide (mrv1): the region begins at the first preparation op (`qnorm_rope_kv_insert`) and ends with `forward_mqa`; the
    projections in between are given up.
minimal (mrv1): the region holds the readers of step state alone; every projection GEMM (`linear[...]`, `bmm`) is in a
    captured piece.
"""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from layer_plans import POLICIES, layer_plan, units_text

PROJECTIONS = {0: 4, 4: 8, 128: 5}  # fused_wqa_wkv, wq_b, wo_a (bmm), wo_b; + compressor; + indexer's three


def test_swa_narrow() -> None:
    assert_expected_inline(
        units_text(layer_plan(0, "narrow")),
        """\
plan: runner mrv2 (asked for), region narrow
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (8 ops), 1 region eager (1 op)

piece_0  captured, 4 ops
    ops       linear[fused_wqa_wkv.weight], dsv4::fused_q_kv_rmsnorm[q_norm], linear[wq_b.weight],
              dsv4::qnorm_rope_kv_insert
    inputs    user input: hidden_states, positions
              step state: step.swa_slot_mapping
              cache: swa_cache
              buffer: rotary.cos_sin
    outputs   rotated [s47, 6, 20] float32

region_0  eager, 1 op
    dsv4::forward_mqa[attn_sink]  split op
    inputs    rotated
              user input: positions
              step state: step.token_to_req, step.swa_block_table
              cache: swa_cache
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_swa_wide() -> None:
    assert_expected_inline(
        units_text(layer_plan(0, "wide")),
        """\
plan: runner mrv1 (asked for), region wide
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (7 ops), 1 region eager (2 ops)

piece_0  captured, 3 ops
    ops       linear[fused_wqa_wkv.weight], dsv4::fused_q_kv_rmsnorm[q_norm], linear[wq_b.weight]
    inputs    user input: hidden_states
    outputs   kv [s47, 20] float32, linear_1 [s47, 120] float32

region_0  eager, 2 ops
    dsv4::qnorm_rope_kv_insert    reads step state step.swa_slot_mapping
    dsv4::forward_mqa[attn_sink]  split op
    inputs    linear_1, kv
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.swa_block_table
              cache: swa_cache
              buffer: rotary.cos_sin
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_swa_minimal() -> None:
    assert_expected_inline(
        units_text(layer_plan(0, "minimal")),
        """\
plan: runner mrv1 (asked for), region minimal
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (7 ops), 1 region eager (2 ops)

piece_0  captured, 3 ops
    ops       linear[fused_wqa_wkv.weight], dsv4::fused_q_kv_rmsnorm[q_norm], linear[wq_b.weight]
    inputs    user input: hidden_states
    outputs   kv [s47, 20] float32, linear_1 [s47, 120] float32

region_0  eager, 2 ops
    dsv4::qnorm_rope_kv_insert    reads step state step.swa_slot_mapping
    dsv4::forward_mqa[attn_sink]  split op
    inputs    linear_1, kv
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.swa_block_table
              cache: swa_cache
              buffer: rotary.cos_sin
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_c4a_narrow() -> None:
    assert_expected_inline(
        units_text(layer_plan(4, "narrow")),
        """\
plan: runner mrv2 (asked for), region narrow
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (15 ops), 1 region eager (2 ops)

piece_0  captured, 11 ops
    ops       linear[fused_wqa_wkv.weight], linear[compressor.fused_wkv_wgate.weight],
              linear[indexer.compressor.fused_wkv_wgate.weight], linear[indexer.weights_proj.weight],
              dsv4::fused_q_kv_rmsnorm[q_norm], linear[wq_b.weight], dsv4::qnorm_rope_kv_insert,
              dsv4::compress_kv_insert[compressor.ape], linear[indexer.wq_b.weight], dsv4::indexer_q_rope,
              dsv4::compress_kv_insert[indexer.compressor.ape]
    inputs    user input: hidden_states, positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c4_state_block_table,
              step.c4_state_slot_mapping, step.c4_slot_mapping
              cache: swa_cache, compressor.state_cache, kv_cache, indexer.compressor.state_cache, indexer.k_cache
              buffer: rotary.cos_sin
    outputs   rotated [s47, 6, 20] float32, rotated_1 [s47, 64, 14] float32, scaled [s47, 64] float32

region_0  eager, 2 ops
    dsv4::sparse_indexer          split op
    dsv4::forward_mqa[attn_sink]  split op
    inputs    rotated_1, scaled, rotated
              user input: positions
              step state: step.token_to_req, step.block_table, step.swa_block_table
              cache: indexer.k_cache, indexer.topk.indices, swa_cache, kv_cache
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_c4a_wide() -> None:
    assert_expected_inline(
        units_text(layer_plan(4, "wide")),
        """\
plan: runner mrv1 (asked for), region wide
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (10 ops), 1 region eager (7 ops)

piece_0  captured, 6 ops
    ops       linear[fused_wqa_wkv.weight], linear[compressor.fused_wkv_wgate.weight],
              linear[indexer.compressor.fused_wkv_wgate.weight], linear[indexer.weights_proj.weight],
              dsv4::fused_q_kv_rmsnorm[q_norm], linear[wq_b.weight]
    inputs    user input: hidden_states
    outputs   linear_1 [s47, 80] float32, linear_2 [s47, 56] float32, linear_3 [s47, 64] float32, qr [s47, 28] float32,
              kv [s47, 20] float32, linear_4 [s47, 120] float32

region_0  eager, 7 ops
    dsv4::qnorm_rope_kv_insert                        reads step state step.swa_slot_mapping
    dsv4::compress_kv_insert[compressor.ape]          reads step state step.token_to_req
    linear[indexer.wq_b.weight]                       wide: between preparation and split op
    dsv4::indexer_q_rope                              wide: between preparation and split op
    dsv4::compress_kv_insert[indexer.compressor.ape]  reads step state step.token_to_req
    dsv4::sparse_indexer                              split op
    dsv4::forward_mqa[attn_sink]                      split op
    inputs    linear_4, kv, linear_1, qr, linear_3, linear_2
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c4_state_block_table,
              step.c4_state_slot_mapping, step.c4_slot_mapping, step.block_table, step.swa_block_table
              cache: swa_cache, compressor.state_cache, kv_cache, indexer.compressor.state_cache, indexer.k_cache,
              indexer.topk.indices
              buffer: rotary.cos_sin
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_c4a_minimal() -> None:
    assert_expected_inline(
        units_text(layer_plan(4, "minimal")),
        """\
plan: runner mrv1 (asked for), region minimal
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (12 ops), 1 region eager (5 ops)

piece_0  captured, 8 ops
    ops       linear[fused_wqa_wkv.weight], linear[compressor.fused_wkv_wgate.weight],
              linear[indexer.compressor.fused_wkv_wgate.weight], linear[indexer.weights_proj.weight],
              dsv4::fused_q_kv_rmsnorm[q_norm], linear[wq_b.weight], linear[indexer.wq_b.weight], dsv4::indexer_q_rope
    inputs    user input: hidden_states, positions
              buffer: rotary.cos_sin
    outputs   linear_1 [s47, 80] float32, linear_2 [s47, 56] float32, kv [s47, 20] float32, linear_4 [s47, 120] float32,
              rotated_1 [s47, 64, 14] float32, scaled [s47, 64] float32

region_0  eager, 5 ops
    dsv4::qnorm_rope_kv_insert                        reads step state step.swa_slot_mapping
    dsv4::compress_kv_insert[compressor.ape]          reads step state step.token_to_req
    dsv4::compress_kv_insert[indexer.compressor.ape]  reads step state step.token_to_req
    dsv4::sparse_indexer                              split op
    dsv4::forward_mqa[attn_sink]                      split op
    inputs    linear_4, kv, linear_1, linear_2, rotated_1, scaled
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c4_state_block_table,
              step.c4_state_slot_mapping, step.c4_slot_mapping, step.block_table, step.swa_block_table
              cache: swa_cache, compressor.state_cache, kv_cache, indexer.compressor.state_cache, indexer.k_cache,
              indexer.topk.indices
              buffer: rotary.cos_sin
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_c128a_narrow() -> None:
    assert_expected_inline(
        units_text(layer_plan(128, "narrow")),
        """\
plan: runner mrv2 (asked for), region narrow
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (10 ops), 1 region eager (1 op)

piece_0  captured, 6 ops
    ops       linear[fused_wqa_wkv.weight], linear[compressor.fused_wkv_wgate.weight], dsv4::fused_q_kv_rmsnorm[q_norm],
              linear[wq_b.weight], dsv4::qnorm_rope_kv_insert, dsv4::compress_kv_insert[compressor.ape]
    inputs    user input: hidden_states, positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c128_state_block_table,
              step.c128_state_slot_mapping, step.c128_slot_mapping
              cache: swa_cache, compressor.state_cache, kv_cache
              buffer: rotary.cos_sin
    outputs   rotated [s47, 6, 20] float32

region_0  eager, 1 op
    dsv4::forward_mqa[attn_sink]  split op
    inputs    rotated
              user input: positions
              step state: step.token_to_req, step.swa_block_table, step.block_table
              cache: swa_cache, kv_cache
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_c128a_wide() -> None:
    assert_expected_inline(
        units_text(layer_plan(128, "wide")),
        """\
plan: runner mrv1 (asked for), region wide
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (8 ops), 1 region eager (3 ops)

piece_0  captured, 4 ops
    ops       linear[fused_wqa_wkv.weight], linear[compressor.fused_wkv_wgate.weight], dsv4::fused_q_kv_rmsnorm[q_norm],
              linear[wq_b.weight]
    inputs    user input: hidden_states
    outputs   linear_1 [s47, 40] float32, kv [s47, 20] float32, linear_2 [s47, 120] float32

region_0  eager, 3 ops
    dsv4::qnorm_rope_kv_insert                reads step state step.swa_slot_mapping
    dsv4::compress_kv_insert[compressor.ape]  reads step state step.token_to_req
    dsv4::forward_mqa[attn_sink]              split op
    inputs    linear_2, kv, linear_1
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c128_state_block_table,
              step.c128_state_slot_mapping, step.c128_slot_mapping, step.swa_block_table, step.block_table
              cache: swa_cache, compressor.state_cache, kv_cache
              buffer: rotary.cos_sin
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_c128a_minimal() -> None:
    assert_expected_inline(
        units_text(layer_plan(128, "minimal")),
        """\
plan: runner mrv1 (asked for), region minimal
sizes: s47 = hidden_states.size()[0] (tokens)
2 pieces captured (8 ops), 1 region eager (3 ops)

piece_0  captured, 4 ops
    ops       linear[fused_wqa_wkv.weight], linear[compressor.fused_wkv_wgate.weight], dsv4::fused_q_kv_rmsnorm[q_norm],
              linear[wq_b.weight]
    inputs    user input: hidden_states
    outputs   linear_1 [s47, 40] float32, kv [s47, 20] float32, linear_2 [s47, 120] float32

region_0  eager, 3 ops
    dsv4::qnorm_rope_kv_insert                reads step state step.swa_slot_mapping
    dsv4::compress_kv_insert[compressor.ape]  reads step state step.token_to_req
    dsv4::forward_mqa[attn_sink]              split op
    inputs    linear_2, kv, linear_1
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c128_state_block_table,
              step.c128_state_slot_mapping, step.c128_slot_mapping, step.swa_block_table, step.block_table
              cache: swa_cache, compressor.state_cache, kv_cache
              buffer: rotary.cos_sin
    outputs   out [s47, 6, 20] float32

piece_1  captured, 4 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[wo_b.weight]
    inputs    out
              user input: positions
              buffer: rotary.cos_sin
    outputs   output [s47, 40] float32""",
    )


def test_inputs_by_provenance() -> None:
    assert_expected_inline(
        str(layer_plan(4, "narrow")).partition("\n\ninputs\n")[2].partition("\n\nworkspace")[0],
        """\
    user input
        hidden_states [s47, 40] float32
        positions [s47] int64
    step state
        step.swa_slot_mapping [s47] int64
        step.token_to_req [s47] int32
        step.c4_state_block_table [3, 11] int32
        step.c4_state_slot_mapping [s47] int64
        step.c4_slot_mapping [s47] int64
        step.block_table [3, 2] int32
        step.swa_block_table [3, 2] int32
    cache
        swa_cache [4, 64, 20] float32
        kv_cache [4, 64, 20] float32
        compressor.state_cache [22, 4, 80] float32
        indexer.k_cache [4, 64, 14] float32
        indexer.compressor.state_cache [22, 4, 56] float32
        indexer.topk.indices [512, 7] int32
    buffer
        rotary.cos_sin [1024, 8] float32
    weight: 15 tensors""",
    )


def test_workspace_of_a_layer() -> None:
    assert_expected_inline(
        str(layer_plan(4, "narrow")).partition("\n\nworkspace")[2],
        """\
 at s47 = 13
    63232 bytes planned, 63232 is the lower bound, 68864 if nothing were shared
           0  rotated_1 (46592 bytes, piece_0 to region_0)
           0  output (2304 bytes, piece_1 to end)
       46592  rotated (6400 bytes, piece_0 to region_0)
       52992  l_hidden_states_ (2304 bytes, start to piece_0)
       52992  out (6400 bytes, region_0 to piece_1)
       55296  l_step_swa_slot_mapping (256 bytes, start to piece_0)
       55552  l_step_c4_state_block_table (256 bytes, start to piece_0)
       55808  l_step_c4_state_slot_mapping (256 bytes, start to piece_0)
       56064  l_step_c4_slot_mapping (256 bytes, start to piece_0)
       59392  scaled (3328 bytes, piece_0 to region_0)
       62720  l_positions_ (256 bytes, start to piece_1)
       62976  l_step_token_to_req (256 bytes, start to region_0)""",
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ratio", PROJECTIONS)
@pytest.mark.parametrize("policy", ["narrow", "minimal"])
def test_every_projection_is_captured(ratio: int, policy: str) -> None:
    plan = layer_plan(ratio, policy)
    captured = [op.op for piece in plan.pieces for op in piece.ops if op.op.startswith(("linear", "bmm"))]
    assert len(captured) == PROJECTIONS[ratio]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ratio", PROJECTIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_region_between_two_pieces(ratio: int, policy: str) -> None:
    assert [unit.kind for unit in layer_plan(ratio, policy).units] == ["piece", "region", "piece"]
