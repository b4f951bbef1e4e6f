"""Plans of a stack of an SWA, a C4A and a C128A layer, and what repeats when there are more of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from expecttest import assert_expected_inline
from layer_plans import stack_plan, units_text
from repository import SUPPORT


def test_stack_narrow() -> None:
    assert_expected_inline(
        units_text(stack_plan("narrow")),
        """\
plan: runner mrv2 (asked for), region narrow
sizes: s72 = input_ids.size()[0] (tokens)
4 pieces captured (42 ops), 3 regions eager (4 ops)

piece_0  captured, 6 ops
    ops       embedding[embedding.weight], rms_norm[layers.0.norm.weight],
              linear[layers.0.attention.fused_wqa_wkv.weight], dsv4::fused_q_kv_rmsnorm[layers.0.attention.q_norm],
              linear[layers.0.attention.wq_b.weight], dsv4::qnorm_rope_kv_insert
    inputs    user input: input_ids, positions
              step state: step.swa_slot_mapping
              cache: layers.0.attention.swa_cache
              buffer: layers.0.attention.rotary.cos_sin
    outputs   hidden_states [s72, 40] float32, rotated [s72, 6, 20] float32

region_0  eager, 1 op
    dsv4::forward_mqa[layers.0.attention.attn_sink]  split op
    inputs    rotated
              user input: positions
              step state: step.token_to_req, step.swa_block_table
              cache: layers.0.attention.swa_cache
    outputs   out [s72, 6, 20] float32

piece_1  captured, 17 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.0.attention.wo_b.weight], add,
              rms_norm[layers.1.norm.weight], linear[layers.1.attention.fused_wqa_wkv.weight],
              linear[layers.1.attention.compressor.fused_wkv_wgate.weight],
              linear[layers.1.attention.indexer.compressor.fused_wkv_wgate.weight],
              linear[layers.1.attention.indexer.weights_proj.weight],
              dsv4::fused_q_kv_rmsnorm[layers.1.attention.q_norm], linear[layers.1.attention.wq_b.weight],
              dsv4::qnorm_rope_kv_insert, dsv4::compress_kv_insert[layers.1.attention.compressor.ape],
              linear[layers.1.attention.indexer.wq_b.weight], dsv4::indexer_q_rope,
              dsv4::compress_kv_insert[layers.1.attention.indexer.compressor.ape]
    inputs    out, hidden_states
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c4_state_block_table,
              step.c4_state_slot_mapping, step.c4_slot_mapping
              cache: layers.1.attention.swa_cache, layers.1.attention.compressor.state_cache,
              layers.1.attention.kv_cache, layers.1.attention.indexer.compressor.state_cache,
              layers.1.attention.indexer.k_cache
              buffer: layers.0.attention.rotary.cos_sin, layers.1.attention.rotary.cos_sin
    outputs   hidden_states_1 [s72, 40] float32, rotated_1 [s72, 6, 20] float32, rotated_2 [s72, 64, 14] float32, scaled
              [s72, 64] float32

region_1  eager, 2 ops
    dsv4::sparse_indexer                             split op
    dsv4::forward_mqa[layers.1.attention.attn_sink]  split op
    inputs    rotated_2, scaled, rotated_1
              user input: positions
              step state: step.token_to_req, step.block_table, step.swa_block_table
              cache: layers.1.attention.indexer.k_cache, layers.1.attention.indexer.topk.indices,
              layers.1.attention.swa_cache, layers.1.attention.kv_cache
    outputs   out_1 [s72, 6, 20] float32

piece_2  captured, 12 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.1.attention.wo_b.weight], add,
              rms_norm[layers.2.norm.weight], linear[layers.2.attention.fused_wqa_wkv.weight],
              linear[layers.2.attention.compressor.fused_wkv_wgate.weight],
              dsv4::fused_q_kv_rmsnorm[layers.2.attention.q_norm], linear[layers.2.attention.wq_b.weight],
              dsv4::qnorm_rope_kv_insert, dsv4::compress_kv_insert[layers.2.attention.compressor.ape]
    inputs    out_1, hidden_states_1
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c128_state_block_table,
              step.c128_state_slot_mapping, step.c128_slot_mapping
              cache: layers.2.attention.swa_cache, layers.2.attention.compressor.state_cache,
              layers.2.attention.kv_cache
              buffer: layers.1.attention.rotary.cos_sin
    outputs   hidden_states_2 [s72, 40] float32, rotated_3 [s72, 6, 20] float32

region_2  eager, 1 op
    dsv4::forward_mqa[layers.2.attention.attn_sink]  split op
    inputs    rotated_3
              user input: positions
              step state: step.token_to_req, step.swa_block_table, step.block_table
              cache: layers.2.attention.swa_cache, layers.2.attention.kv_cache
    outputs   out_2 [s72, 6, 20] float32

piece_3  captured, 7 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.2.attention.wo_b.weight], add, rms_norm[norm.weight],
              linear[lm_head.weight]
    inputs    out_2, hidden_states_2
              user input: positions
              buffer: layers.1.attention.rotary.cos_sin
    outputs   logits [s72, 97] float32""",
    )


def test_stack_wide() -> None:
    assert_expected_inline(
        units_text(stack_plan("wide")),
        """\
plan: runner mrv1 (asked for), region wide
sizes: s72 = input_ids.size()[0] (tokens)
4 pieces captured (34 ops), 3 regions eager (12 ops)

piece_0  captured, 5 ops
    ops       embedding[embedding.weight], rms_norm[layers.0.norm.weight],
              linear[layers.0.attention.fused_wqa_wkv.weight], dsv4::fused_q_kv_rmsnorm[layers.0.attention.q_norm],
              linear[layers.0.attention.wq_b.weight]
    inputs    user input: input_ids
    outputs   hidden_states [s72, 40] float32, kv [s72, 20] float32, linear_1 [s72, 120] float32

region_0  eager, 2 ops
    dsv4::qnorm_rope_kv_insert                       reads step state step.swa_slot_mapping
    dsv4::forward_mqa[layers.0.attention.attn_sink]  split op
    inputs    linear_1, kv
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.swa_block_table
              cache: layers.0.attention.swa_cache
              buffer: layers.0.attention.rotary.cos_sin
    outputs   out [s72, 6, 20] float32

piece_1  captured, 12 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.0.attention.wo_b.weight], add,
              rms_norm[layers.1.norm.weight], linear[layers.1.attention.fused_wqa_wkv.weight],
              linear[layers.1.attention.compressor.fused_wkv_wgate.weight],
              linear[layers.1.attention.indexer.compressor.fused_wkv_wgate.weight],
              linear[layers.1.attention.indexer.weights_proj.weight],
              dsv4::fused_q_kv_rmsnorm[layers.1.attention.q_norm], linear[layers.1.attention.wq_b.weight]
    inputs    out, hidden_states
              user input: positions
              buffer: layers.0.attention.rotary.cos_sin
    outputs   hidden_states_1 [s72, 40] float32, linear_4 [s72, 80] float32, linear_5 [s72, 56] float32, linear_6 [s72,
              64] float32, qr_1 [s72, 28] float32, kv_1 [s72, 20] float32, linear_7 [s72, 120] float32

region_1  eager, 7 ops
    dsv4::qnorm_rope_kv_insert                                           reads step state step.swa_slot_mapping
    dsv4::compress_kv_insert[layers.1.attention.compressor.ape]          reads step state step.token_to_req
    linear[layers.1.attention.indexer.wq_b.weight]                       wide: between preparation and split op
    dsv4::indexer_q_rope                                                 wide: between preparation and split op
    dsv4::compress_kv_insert[layers.1.attention.indexer.compressor.ape]  reads step state step.token_to_req
    dsv4::sparse_indexer                                                 split op
    dsv4::forward_mqa[layers.1.attention.attn_sink]                      split op
    inputs    linear_7, kv_1, linear_4, qr_1, linear_6, linear_5
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c4_state_block_table,
              step.c4_state_slot_mapping, step.c4_slot_mapping, step.block_table, step.swa_block_table
              cache: layers.1.attention.swa_cache, layers.1.attention.compressor.state_cache,
              layers.1.attention.kv_cache, layers.1.attention.indexer.compressor.state_cache,
              layers.1.attention.indexer.k_cache, layers.1.attention.indexer.topk.indices
              buffer: layers.1.attention.rotary.cos_sin
    outputs   out_1 [s72, 6, 20] float32

piece_2  captured, 10 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.1.attention.wo_b.weight], add,
              rms_norm[layers.2.norm.weight], linear[layers.2.attention.fused_wqa_wkv.weight],
              linear[layers.2.attention.compressor.fused_wkv_wgate.weight],
              dsv4::fused_q_kv_rmsnorm[layers.2.attention.q_norm], linear[layers.2.attention.wq_b.weight]
    inputs    out_1, hidden_states_1
              user input: positions
              buffer: layers.1.attention.rotary.cos_sin
    outputs   hidden_states_2 [s72, 40] float32, linear_11 [s72, 40] float32, kv_2 [s72, 20] float32, linear_12 [s72,
              120] float32

region_2  eager, 3 ops
    dsv4::qnorm_rope_kv_insert                                   reads step state step.swa_slot_mapping
    dsv4::compress_kv_insert[layers.2.attention.compressor.ape]  reads step state step.token_to_req
    dsv4::forward_mqa[layers.2.attention.attn_sink]              split op
    inputs    linear_12, kv_2, linear_11
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c128_state_block_table,
              step.c128_state_slot_mapping, step.c128_slot_mapping, step.swa_block_table, step.block_table
              cache: layers.2.attention.swa_cache, layers.2.attention.compressor.state_cache,
              layers.2.attention.kv_cache
              buffer: layers.1.attention.rotary.cos_sin
    outputs   out_2 [s72, 6, 20] float32

piece_3  captured, 7 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.2.attention.wo_b.weight], add, rms_norm[norm.weight],
              linear[lm_head.weight]
    inputs    out_2, hidden_states_2
              user input: positions
              buffer: layers.1.attention.rotary.cos_sin
    outputs   logits [s72, 97] float32""",
    )


def test_stack_minimal() -> None:
    assert_expected_inline(
        units_text(stack_plan("minimal")),
        """\
plan: runner mrv1 (asked for), region minimal
sizes: s72 = input_ids.size()[0] (tokens)
4 pieces captured (36 ops), 3 regions eager (10 ops)

piece_0  captured, 5 ops
    ops       embedding[embedding.weight], rms_norm[layers.0.norm.weight],
              linear[layers.0.attention.fused_wqa_wkv.weight], dsv4::fused_q_kv_rmsnorm[layers.0.attention.q_norm],
              linear[layers.0.attention.wq_b.weight]
    inputs    user input: input_ids
    outputs   hidden_states [s72, 40] float32, kv [s72, 20] float32, linear_1 [s72, 120] float32

region_0  eager, 2 ops
    dsv4::qnorm_rope_kv_insert                       reads step state step.swa_slot_mapping
    dsv4::forward_mqa[layers.0.attention.attn_sink]  split op
    inputs    linear_1, kv
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.swa_block_table
              cache: layers.0.attention.swa_cache
              buffer: layers.0.attention.rotary.cos_sin
    outputs   out [s72, 6, 20] float32

piece_1  captured, 14 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.0.attention.wo_b.weight], add,
              rms_norm[layers.1.norm.weight], linear[layers.1.attention.fused_wqa_wkv.weight],
              linear[layers.1.attention.compressor.fused_wkv_wgate.weight],
              linear[layers.1.attention.indexer.compressor.fused_wkv_wgate.weight],
              linear[layers.1.attention.indexer.weights_proj.weight],
              dsv4::fused_q_kv_rmsnorm[layers.1.attention.q_norm], linear[layers.1.attention.wq_b.weight],
              linear[layers.1.attention.indexer.wq_b.weight], dsv4::indexer_q_rope
    inputs    out, hidden_states
              user input: positions
              buffer: layers.0.attention.rotary.cos_sin, layers.1.attention.rotary.cos_sin
    outputs   hidden_states_1 [s72, 40] float32, linear_4 [s72, 80] float32, linear_5 [s72, 56] float32, kv_1 [s72, 20]
              float32, linear_7 [s72, 120] float32, rotated_2 [s72, 64, 14] float32, scaled [s72, 64] float32

region_1  eager, 5 ops
    dsv4::qnorm_rope_kv_insert                                           reads step state step.swa_slot_mapping
    dsv4::compress_kv_insert[layers.1.attention.compressor.ape]          reads step state step.token_to_req
    dsv4::compress_kv_insert[layers.1.attention.indexer.compressor.ape]  reads step state step.token_to_req
    dsv4::sparse_indexer                                                 split op
    dsv4::forward_mqa[layers.1.attention.attn_sink]                      split op
    inputs    linear_7, kv_1, linear_4, linear_5, rotated_2, scaled
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c4_state_block_table,
              step.c4_state_slot_mapping, step.c4_slot_mapping, step.block_table, step.swa_block_table
              cache: layers.1.attention.swa_cache, layers.1.attention.compressor.state_cache,
              layers.1.attention.kv_cache, layers.1.attention.indexer.compressor.state_cache,
              layers.1.attention.indexer.k_cache, layers.1.attention.indexer.topk.indices
              buffer: layers.1.attention.rotary.cos_sin
    outputs   out_1 [s72, 6, 20] float32

piece_2  captured, 10 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.1.attention.wo_b.weight], add,
              rms_norm[layers.2.norm.weight], linear[layers.2.attention.fused_wqa_wkv.weight],
              linear[layers.2.attention.compressor.fused_wkv_wgate.weight],
              dsv4::fused_q_kv_rmsnorm[layers.2.attention.q_norm], linear[layers.2.attention.wq_b.weight]
    inputs    out_1, hidden_states_1
              user input: positions
              buffer: layers.1.attention.rotary.cos_sin
    outputs   hidden_states_2 [s72, 40] float32, linear_11 [s72, 40] float32, kv_2 [s72, 20] float32, linear_12 [s72,
              120] float32

region_2  eager, 3 ops
    dsv4::qnorm_rope_kv_insert                                   reads step state step.swa_slot_mapping
    dsv4::compress_kv_insert[layers.2.attention.compressor.ape]  reads step state step.token_to_req
    dsv4::forward_mqa[layers.2.attention.attn_sink]              split op
    inputs    linear_12, kv_2, linear_11
              user input: positions
              step state: step.swa_slot_mapping, step.token_to_req, step.c128_state_block_table,
              step.c128_state_slot_mapping, step.c128_slot_mapping, step.swa_block_table, step.block_table
              cache: layers.2.attention.swa_cache, layers.2.attention.compressor.state_cache,
              layers.2.attention.kv_cache
              buffer: layers.1.attention.rotary.cos_sin
    outputs   out_2 [s72, 6, 20] float32

piece_3  captured, 7 ops
    ops       dsv4::inverse_rope, bmm, flatten, linear[layers.2.attention.wo_b.weight], add, rms_norm[norm.weight],
              linear[lm_head.weight]
    inputs    out_2, hidden_states_2
              user input: positions
              buffer: layers.1.attention.rotary.cos_sin
    outputs   logits [s72, 97] float32""",
    )


def test_workspace_of_a_stack_is_shared_by_its_layers() -> None:
    assert_expected_inline(
        str(stack_plan("narrow")).partition("\n\nworkspace")[2],
        """\
 at s72 = 13
    69632 bytes planned, 69632 is the lower bound, 102912 if nothing were shared
           0  rotated (6400 bytes, piece_0 to region_0)
           0  rotated_2 (46592 bytes, piece_1 to region_1)
           0  rotated_3 (6400 bytes, piece_2 to region_2)
           0  logits (5120 bytes, piece_3 to end)
        6400  l_input_ids_ (256 bytes, start to piece_0)
        6400  out_2 (6400 bytes, region_2 to piece_3)
       12800  hidden_states_2 (2304 bytes, piece_2 to piece_3)
       46592  out (6400 bytes, region_0 to piece_1)
       46592  out_1 (6400 bytes, region_1 to piece_2)
       52992  rotated_1 (6400 bytes, piece_1 to region_1)
       59392  scaled (3328 bytes, piece_1 to region_1)
       62720  hidden_states (2304 bytes, piece_0 to piece_1)
       65024  hidden_states_1 (2304 bytes, piece_1 to piece_2)
       67328  l_positions_ (256 bytes, start to piece_3)
       67584  l_step_swa_slot_mapping (256 bytes, start to piece_2)
       67840  l_step_token_to_req (256 bytes, start to region_2)
       68096  l_step_c4_state_block_table (256 bytes, start to piece_1)
       68352  l_step_c4_state_slot_mapping (256 bytes, start to piece_1)
       68608  l_step_c4_slot_mapping (256 bytes, start to piece_1)
       68864  l_step_c128_state_block_table (256 bytes, start to piece_2)
       69120  l_step_c128_state_slot_mapping (256 bytes, start to piece_2)
       69376  l_step_c128_slot_mapping (256 bytes, start to piece_2)""",
    )


def test_layers_of_one_kind_share_their_pieces() -> None:
    plan = stack_plan("narrow", (4, 128, 4, 128, 4, 128))
    # layers + 1 pieces: head of layer 0, five joints, tail. Joints after C4A are equal, and those after C128A are.
    assert [piece.duplicate_of for piece in plan.pieces] == [None, None, None, "piece_1", "piece_2", "piece_1", None]


@pytest.mark.exhaustive
def test_two_processes_print_the_same() -> None:
    program = "from layer_plans import stack_plan; s = stack_plan('minimal'); print(s); print(s.to_json())"
    runs = [
        subprocess.run([sys.executable, "-c", program], cwd=SUPPORT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0].startswith("plan: runner mrv1")
