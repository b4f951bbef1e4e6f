"""Streams of real graphs: the attention layer as tables to be read (see `stream_tables`), and small functions a rule each.

Then the same and random graphs as logs, for the happens-before checker to judge.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from layer_plans import mark_request_dims
from paging import Paging, tiny_config
from runtime_helpers import LIBRARY
from stages import stages_of
from stream_logs import happens_before, log_of
from stream_tables import layer_graph, streams_of, table, unit_events
from torch import Tensor, fx
from toy_ops import SPLIT

from dsv4_compile import register_op
from dsv4_compile.analysis.dependencies import predecessors
from dsv4_compile.analysis.stream_schedule import events_of, schedule
from dsv4_compile.errors import StreamRaceError
from dsv4_compile.graph.partitioned import PartitionedGraph, Unit
from dsv4_compile.graph.traced import Effects
from dsv4_compile.models.deepseek_v4 import AttentionStack, DeepseekV4Config, bind_caches
from dsv4_compile.passes.assign_streams import order_of
from dsv4_compile.runtime.engines.host.race_checker import LogEntry, StreamLaunch, check_races

toy = torch.ops.toy
# Gives memory of its argument as another dtype.
LIBRARY.define("bits_of(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("bits_of", lambda x: x.add_(1).view(torch.int32), "CompositeExplicitAutograd")
torch.library.register_fake("probe::bits_of", lambda x: x.view(torch.int32), lib=LIBRARY)
BLOCK = 64  # bytes of a storage in logs
GENERATOR, GUARDED = 1000, 1001  # numbers of no storage
X = torch.zeros(5, 4)


# --- the three kinds of layers ---


def test_swa_on_one_stream() -> None:
    assert_expected_inline(
        table(*layer_graph(0, 0)),
        """\
stream 0
fused_wqa_wkv
fused_q_kv_rmsnorm
wq_b
qnorm_rope_kv_insert""",
    )


def test_swa_with_three_side_streams() -> None:
    """It is a chain: there is nothing to put elsewhere."""
    assert_expected_inline(
        table(*layer_graph(0, 3)),
        """\
stream 0
fused_wqa_wkv
fused_q_kv_rmsnorm
wq_b
qnorm_rope_kv_insert""",
    )


def test_c4a_on_one_stream() -> None:
    assert_expected_inline(
        table(*layer_graph(4, 0)),
        """\
stream 0
fused_wqa_wkv
compressor.fused_wkv_wgate
indexer.compressor.fused_wkv_wgate
indexer.weights_proj
fused_q_kv_rmsnorm
wq_b
qnorm_rope_kv_insert
compress_kv_insert compressor
indexer.wq_b
indexer_q_rope
compress_kv_insert indexer.compressor""",
    )


def test_c4a_with_three_side_streams() -> None:
    """Three side GEMMs beside the fused one; then q and KV, the indexer and the two compressors side by side."""
    assert_expected_inline(
        table(*layer_graph(4, 3)),
        """\
stream 0               stream 1               stream 2                        stream 3
fused_wqa_wkv          indexer.weights_proj   compressor.fused_wkv_wgate      indexer.compressor.fused_wkv_wgate
fused_q_kv_rmsnorm                            compress_kv_insert compressor   compress_kv_insert indexer.compressor
wq_b                   indexer.wq_b
qnorm_rope_kv_insert   indexer_q_rope
compressor.fused_wkv_wgate waits for the start
indexer.compressor.fused_wkv_wgate waits for the start
indexer.weights_proj waits for the start
indexer.wq_b waits for fused_q_kv_rmsnorm
joined: indexer_q_rope, compress_kv_insert compressor, compress_kv_insert indexer.compressor""",
    )


def test_c128a_on_one_stream() -> None:
    assert_expected_inline(
        table(*layer_graph(128, 0)),
        """\
stream 0
fused_wqa_wkv
compressor.fused_wkv_wgate
fused_q_kv_rmsnorm
wq_b
qnorm_rope_kv_insert
compress_kv_insert compressor""",
    )


def test_c128a_with_three_side_streams() -> None:
    assert_expected_inline(
        table(*layer_graph(128, 3)),
        """\
stream 0               stream 1
fused_wqa_wkv          compressor.fused_wkv_wgate
fused_q_kv_rmsnorm     compress_kv_insert compressor
wq_b
qnorm_rope_kv_insert
compressor.fused_wkv_wgate waits for the start
joined: compress_kv_insert compressor""",
    )


def test_the_output_projection_is_a_chain() -> None:
    assert_expected_inline(
        table(*layer_graph(4, 3), 2),
        """\
stream 0
inverse_rope
bmm
flatten
wo_b""",
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", ["flash", "pro"])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_released_sizes_give_the_streams_of_the_tiny_ones(size: str, ratio: int) -> None:
    config = getattr(DeepseekV4Config, size)(num_hidden_layers=1, compress_ratios=(ratio,))
    assert table(*layer_graph(ratio, 3, config)) == table(*layer_graph(ratio, 3))


def test_layers_of_a_stack_have_the_streams_of_one() -> None:
    """With what stands between two layers: residual and norm, too light for a stream."""
    config = tiny_config((4, 4, 4))
    paging = Paging(config, [40, 40], max_reqs=3)
    stack = AttentionStack(config)
    bind_caches(stack, paging.caches())
    positions, step = paging.step([(0, 0, 5), (1, 0, 8)])
    ids = torch.zeros(13, dtype=torch.long)
    _, graph, plan = stages_of(stack, ids, positions, mark_request_dims(step), runner="mrv2", aux_streams=3)
    assert_expected_inline(
        table(graph, plan, 2),
        """\
stream 0               stream 1               stream 2                        stream 3
inverse_rope
bmm
flatten
wo_b
add
rms_norm norm
fused_wqa_wkv          indexer.weights_proj   compressor.fused_wkv_wgate      indexer.compressor.fused_wkv_wgate
fused_q_kv_rmsnorm                            compress_kv_insert compressor   compress_kv_insert indexer.compressor
wq_b                   indexer.wq_b
qnorm_rope_kv_insert   indexer_q_rope
compressor.fused_wkv_wgate waits for rms_norm norm
indexer.compressor.fused_wkv_wgate waits for rms_norm norm
indexer.weights_proj waits for rms_norm norm
indexer.wq_b waits for fused_q_kv_rmsnorm
joined: indexer_q_rope, compress_kv_insert compressor, compress_kv_insert indexer.compressor""",
    )
    assert graph.duplicates == {"piece_2": "piece_1"}
    assert streams_of(graph, graph.units[4]) == streams_of(graph, graph.units[2])


def test_the_plan_shows_streams() -> None:
    _, plan = layer_graph(4, 3)
    piece = str(plan).partition("piece_0")[2].partition("    takes")[0]
    assert_expected_inline(
        piece,
        """\
  captured, 11 ops on 4 streams
    stream 0  linear[fused_wqa_wkv.weight], dsv4::fused_q_kv_rmsnorm[q_norm], linear[wq_b.weight],
              dsv4::qnorm_rope_kv_insert
    stream 1  linear[indexer.weights_proj.weight], linear[indexer.wq_b.weight], dsv4::indexer_q_rope
    stream 2  linear[compressor.fused_wkv_wgate.weight], dsv4::compress_kv_insert[compressor.ape]
    stream 3  linear[indexer.compressor.fused_wkv_wgate.weight], dsv4::compress_kv_insert[indexer.compressor.ape]
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
    outputs   output [s47, 40] float32

inputs
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
    weight: 15 tensors

workspace at s47 = 13
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
    streams = [op["stream"] for op in json.loads(plan.to_json())["units"][0]["ops"]]
    assert streams == [0, 2, 3, 1, 0, 0, 0, 2, 1, 1, 3]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_piece_that_stays_whole_and_its_copies_run_on_one_stream_and_the_plan_says_so(compiler: str) -> None:
    """Two values would cross between its parts, and are one piece of memory."""

    def block(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        h = x @ v
        bits = torch.ops.probe.bits_of(h)
        return toy.fresh(h @ v + (x @ w) @ w + bits.sum() + h.sum())

    def fn(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return products(block(block(x, v, w), v, w), v, w)

    options = {"split_ops": SPLIT, "aux_streams": 3, "piece_compiler": compiler}
    _, graph, plan = stages_of(fn, X, W, W.clone(), **options)
    whole, copy, other = (unit for unit in graph.units if unit.kind == "piece")
    assert graph.duplicates == {copy.name: whole.name}
    assert [len(set(streams_of(graph, unit))) for unit in (whole, copy, other)] == [1, 1, 2]
    note = "piece_0 runs on one stream: bits shares memory with h, and both cross between its subgraphs"
    assert graph.notes == (note,)
    assert str(plan).count("on 2 streams") == 1


def test_without_side_streams_the_plan_is_as_ever() -> None:
    graph, plan = layer_graph(4, 0)
    assert graph.streams == {}
    assert "stream" not in str(plan)


# --- one rule each ---


def streams_by_op(fn: Any, *args: Tensor, streams: int = 3, **options: Any) -> dict[str, int]:
    _, graph, _ = stages_of(fn, *args, **{"split_ops": SPLIT, "aux_streams": streams, **options})
    return {node.name: graph.streams.get(node, 0) for node in graph.traced.compute_nodes()}


def products(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    first = x @ v
    second = x @ w
    return toy.fresh(first + second)


W = torch.zeros(4, 4)


def test_two_products_side_by_side() -> None:
    assert streams_by_op(products, X, W, W.clone()) == {"first": 0, "second": 1, "add": 0, "fresh": 0}


def test_streams_end_with_their_piece() -> None:
    """What runs beside the second product of one piece may not do so beyond the region."""

    def fn(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        h = toy.fresh(products(x, v, w))
        return products(h, v, w)

    _, graph, _ = stages_of(fn, X, W, W.clone(), split_ops=SPLIT, aux_streams=3)
    pieces = [unit for unit in graph.units if unit.kind == "piece"]
    assert [unit_events(graph, unit).waits for unit in pieces] == [((), (-1,), (1,))] * 2
    assert not any(node in graph.streams for unit in graph.units if unit.kind == "region" for node in unit.nodes)


def test_pointwise_branches_are_too_light() -> None:
    def fn(x: Tensor) -> Tensor:
        return toy.fresh(x.sin() + x.cos() + x.exp() + x.tanh())

    assert set(streams_by_op(fn, X).values()) == {0}


def test_conflicting_writes_keep_their_order() -> None:
    """The write to the cache comes after the product that reads it first, and ahead of the other one."""

    def fn(x: Tensor, w: Tensor, cache: Tensor) -> Tensor:
        early = cache @ w
        toy.kv_write(x, x[:, 0].long(), cache)
        late = cache @ w
        return toy.fresh(early + late)

    register_op("toy::kv_write", role="capture")
    _, graph, _ = stages_of(fn, X, W, torch.zeros(6, 4), split_ops=SPLIT, aux_streams=3)
    names = [node.name for node in graph.units[0].nodes]
    order = order_of(graph.units[0].nodes, graph.traced.effects)
    assert names.index("early") in order[names.index("kv_write")]
    assert names.index("kv_write") in order[names.index("late")]


def test_random_draws_keep_their_order() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        first = torch.bernoulli(x @ w)
        second = torch.bernoulli(x.t() @ x)
        return toy.fresh(first @ second)

    _, graph, _ = stages_of(fn, X, W, split_ops=SPLIT, aux_streams=3)
    unit = graph.units[0]
    draws = [place for place, node in enumerate(unit.nodes) if graph.traced.effects[node].random]
    assert len(draws) == 2
    assert draws[0] in order_of(unit.nodes, graph.traced.effects)[draws[1]]
    assert len(set(streams_of(graph, unit))) == 2


# --- from effects to a log, and the checker on it ---


def bytes_of(storages: Collection[int]) -> tuple[tuple[int, int], ...]:
    return tuple((number * BLOCK, number * BLOCK + BLOCK) for number in sorted(storages))


def launches_of(
    nodes: Sequence[fx.Node], effects: Mapping[fx.Node, Effects], streams: Sequence[int]
) -> list[StreamLaunch]:
    """What a host engine would log: a storage is a block of bytes, the generator is one, what barriers guard another.

    A random draw writes the generator. A barrier writes what it guards, and every other op reads that.
    """
    launches = []
    for node, stream in zip(nodes, streams, strict=True):
        done = effects[node]
        writes = done.writes | done.makes | ({GENERATOR} if done.random else set())
        reads = done.reads | (set() if done.barrier else {GUARDED})
        writes |= {GUARDED} if done.barrier else set()
        launches.append(StreamLaunch(name=node.name, stream=stream, reads=bytes_of(reads), writes=bytes_of(writes)))
    return launches


def log_of_unit(graph: PartitionedGraph, unit: Unit, order: Sequence[Collection[int]] | None = None) -> list[LogEntry]:
    """The log with the events that the dependences call for, or others in their place."""
    streams = streams_of(graph, unit)
    events = events_of(order_of(unit.nodes, graph.traced.effects) if order is None else order, streams)
    return log_of(launches_of(unit.nodes, graph.traced.effects, streams), events.waits, events.joins)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_the_layers_are_free_of_races(ratio: int) -> None:
    graph, _ = layer_graph(ratio, 3)
    for unit in graph.units:
        check_races(log_of_unit(graph, unit))


def test_taking_away_a_dependence_between_streams_is_noticed() -> None:
    graph, _ = layer_graph(4, 3)
    unit = graph.units[0]
    names, order = [node.name for node in unit.nodes], order_of(unit.nodes, graph.traced.effects)
    waits = [(op, other) for op, others in enumerate(unit_events(graph, unit).waits) for other in others if other >= 0]
    assert [(names[op], names[other]) for op, other in waits] == [("linear_5", "fused_q_kv_rmsnorm")]
    ((op, other),) = waits
    less = [earlier - {other} if place == op else earlier for place, earlier in enumerate(order)]
    with pytest.raises(StreamRaceError, match=r"^fused_q_kv_rmsnorm on stream 0 writes .* which linear_5 on stream 1"):
        check_races(log_of_unit(graph, unit, less))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[fx.Node], dict[fx.Node, Effects]]:
    """Nodes that take any earlier ones, make a storage each, and read, write, draw and guard at random."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    effects: dict[fx.Node, Effects] = {}
    for number in range(draw(st.integers(1, 10))):
        taken = draw(st.lists(st.sampled_from(nodes), max_size=2)) if nodes else []
        node = graph.call_function(torch.cat, (taken,))
        mine = frozenset(storage for arg in taken for storage in effects[arg].makes)
        shared = st.frozensets(st.integers(0, 3), max_size=2)
        effects[node] = Effects(
            reads=draw(shared) | mine,
            writes=draw(shared) if draw(st.booleans()) else frozenset(),
            makes=frozenset({10 + number}),
            random=draw(st.integers(0, 3)) == 0,
            barrier="a barrier" if draw(st.integers(0, 9)) == 0 else None,
        )
        nodes.append(node)
    return nodes, effects


@given(graphs(), st.data())
def test_streams_of_random_graphs_are_free_of_races(
    graph: tuple[list[fx.Node], dict[fx.Node, Effects]], data: st.DataObject
) -> None:
    """On streams at random, and on those of the schedule; and every edge of the dependences is kept."""
    nodes, effects = graph
    order = order_of(nodes, effects)
    weights = data.draw(st.lists(st.sampled_from([1, 4, 9]), min_size=len(nodes), max_size=len(nodes)))
    at_random = data.draw(st.lists(st.integers(0, 3), min_size=len(nodes), max_size=len(nodes)))
    for streams in (at_random, schedule(order, weights, 3)):
        events = events_of(order, streams)
        check_races(log_of(launches_of(nodes, effects, streams), events.waits, events.joins))
        past = happens_before(streams, events)
        for place, earlier in enumerate(predecessors(nodes, effects).values()):
            assert {nodes.index(node) for node in earlier} <= past[place]
