"""Captures of a tiny stack on the host engine, and whether what they took says what others take."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from dsv4_compile.models.deepseek_v4 import DeepseekV4Config
from dsv4_compile.plan_model.fake_stack import read_stack
from dsv4_compile.plan_model.measure_engine import (
    capture_all,
    measure_host_engine,
    package_ops_split,
    ready_pieces,
    tiny_graph,
)
from dsv4_compile.plan_model.memory import most_temporaries, sizes_for
from dsv4_compile.runtime.engines.host.engine import HostEngine


def test_a_tiny_stack_is_measured() -> None:
    found = measure_host_engine(DeepseekV4Config.tiny((0, 0)))
    # one layer for both: around the two runs of ops of this package
    assert (found.engine, found.pieces, found.ops) == ("host", 3, 10)
    assert found.seconds_an_op > 0
    assert found.bytes_an_op > 0
    assert 1 <= found.pool_factor < 4
    assert not tracemalloc.is_tracing()


@pytest.mark.exhaustive
def test_pieces_of_the_tiny_stack_hold_no_op_of_this_package() -> None:
    graph = tiny_graph(DeepseekV4Config.pro())
    ops = [op for unit in graph.units if unit.kind == "piece" for node in unit.nodes for op in _ops(graph, node)]
    assert ops
    assert not [op for op in ops if op.startswith("dsv4::")]


def _ops(graph: object, node: object) -> tuple[str, ...]:
    return graph.traced.effects[node].ops  # type: ignore[attr-defined, no-any-return]


@pytest.mark.exhaustive
@pytest.mark.parametrize("tokens", [16, 200])
@pytest.mark.parametrize("sizes", [{"hidden_size": 256}, {"num_attention_heads": 8, "head_dim": 64, "vocab_size": 900}])
def test_the_factor_says_what_the_pool_of_other_sizes_takes(sizes: dict[str, int], tokens: int) -> None:
    """Within a factor of two: it is an estimate."""
    factor = measure_host_engine(DeepseekV4Config.tiny((0, 4, 128))).pool_factor
    other = DeepseekV4Config.tiny((0, 4, 128, 4), **sizes)
    graph = read_stack(other, torch.float32, 2, package_ops_split(), lambda _, graph: graph)
    call = sizes_for(graph, tokens)
    engine = HostEngine()
    pool = engine.make_pool()
    kept = capture_all(engine, ready_pieces(graph, call), pool)
    assert kept
    estimate = factor * most_temporaries(graph, call, leaving=False)
    assert 0.5 < estimate / pool.nbytes < 2
