"""Each pass is broken in turn, and its check must notice. `test_mutations_oracle.py` takes checks away too.

What stands here is the proof that a green run of the others means something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mutated_passes import (
    DEPENDENCES,
    PASSES,
    forget,
    in_context,
    prepared,
    run,
    toy,
)
from stages import stages_of
from torch import Tensor, fx
from toy_ops import SPLIT

from dsv4_compile import passes
from dsv4_compile.errors import HazardError, PlanError
from dsv4_compile.graph.partitioned import PartitionedGraph, Unit
from dsv4_compile.graph.traced import Effects

Break = Callable[[PartitionedGraph], PartitionedGraph]


def layer(x: Tensor, w: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """One of everything: a container, a view, a mutation, an allocation, two split ops."""
    first, second = toy.tup(x @ w)
    view = first[:, :2]
    view.add_(second[:, 2:])
    out = torch.empty_like(first)
    toy.attn(first, out)
    return out + 1, view


def plan(fn: Callable[..., Any] = layer, **options: Any) -> PartitionedGraph:
    second = torch.randn(4, 4) if fn is layer else torch.randn(5, 4)
    _, graph, _ = stages_of(fn, torch.randn(5, 4), second, **{"split_ops": SPLIT, **options})
    return graph


@pytest.fixture(scope="module")
def good() -> PartitionedGraph:
    return plan()


def in_unit(index: int, change: Callable[[PartitionedGraph, Unit], Unit]) -> Break:
    """The graph with one unit changed."""

    def broken(graph: PartitionedGraph) -> PartitionedGraph:
        units = list(graph.units)
        units[index] = change(graph, units[index])
        return replace(graph, units=tuple(units))

    return broken


def runs_also(name: str, unit: Unit) -> Unit:
    """The unit with a node of that name in its graph as well."""
    graph = fx.Graph()
    output = graph.graph_copy(unit.gm.graph, {})
    graph.create_node("call_function", torch.zeros, (1,), name=name)
    graph.output(output)
    return replace(unit, gm=fx.GraphModule(unit.gm, graph))


def without(name: str, unit: Unit) -> Unit:
    """The unit whose graph leaves out a node that nobody uses."""
    graph = fx.Graph()
    kept: dict[fx.Node, fx.Node] = {}
    for node in unit.gm.graph.nodes:
        if node.name != name:
            kept[node] = graph.node_copy(node, lambda arg: kept[arg])
    return replace(unit, gm=fx.GraphModule(unit.gm, graph))


def node_of(graph: PartitionedGraph, name: str) -> fx.Node:
    return next(node for node in graph.traced.gm.graph.nodes if node.name == name)


# region_0: tup   piece_1: add_   region_1: attn   piece_2: add   (piece_0: matmul)
MISPLACED = {
    "a node is lost": (in_unit(1, lambda d, u: replace(u, nodes=u.nodes[1:])), "every compute node exactly once"),
    "a node is listed twice": (
        in_unit(1, lambda d, u: replace(u, nodes=u.nodes * 2)),
        "every compute node exactly once",
    ),
    "units change places": (lambda d: replace(d, units=d.units[::-1]), "exactly once in program order"),
    "an eager node is captured": (in_unit(1, lambda d, u: replace(u, kind="piece")), "tup is in region_0 against"),
    "a captured node is eager": (in_unit(0, lambda d, u: replace(u, kind="region")), "matmul is in piece_0 against"),
    "a unit is empty": (
        lambda d: replace(d, units=(*d.units, replace(d.units[0], name="piece_9", nodes=()))),
        "piece_9 is empty",
    ),
    "a mutation runs in two units": (
        in_unit(3, lambda d, u: runs_also("add_", u)),
        "the graph of region_1 does not run exactly its own nodes",
    ),
    "a mutation runs again for the caller": (
        lambda d: replace(d, output_assembly=runs_also("add_", d.output_assembly)),
        "the output assembly runs add_",
    ),
    "a mutation is left out of the code": (
        in_unit(2, lambda d, u: without("add_", u)),
        "the graph of piece_1 does not run exactly its own nodes",
    ),
    "a view crosses": (
        in_unit(2, lambda d, u: replace(u, outputs=(*u.outputs, node_of(d, "view")))),
        "piece_1 outputs view, a view",
    ),
    "a container crosses": (
        in_unit(1, lambda d, u: replace(u, outputs=(*u.outputs, node_of(d, "tup")))),
        "region_0 outputs tup, a container",
    ),
    "a value is taken before it is made": (
        in_unit(0, lambda d, u: replace(u, inputs=(*u.inputs, node_of(d, "first")))),
        "piece_0 uses first before any unit makes it",
    ),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_the_partition_is_checked(good: PartitionedGraph, case: str) -> None:
    broken, message = MISPLACED[case]
    passes.check_partition(good)
    with pytest.raises(PlanError, match=message):
        passes.check_partition(broken(good))


@pytest.mark.parametrize("kind", DEPENDENCES)
def test_an_illegal_move_is_noticed(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    program, changes = DEPENDENCES[kind]
    plan(program, region="minimal", runner="mrv2")
    forget(monkeypatch, changes)
    with pytest.raises(PlanError, match="changed what it sees: it conflicts with a node it passed"):
        plan(program, region="minimal", runner="mrv2")


def test_a_move_that_loses_a_node_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PASSES["move_nodes"], "order_by_phase", lambda nodes, *_: list(nodes)[1:])
    with pytest.raises(PlanError, match="a move lost or doubled a node"):
        plan(region="minimal")


@pytest.mark.parametrize(
    ("program", "message"),
    [(prepared, "op toy::kv_write.default reads the step state"), (in_context, "reads the step context")],
)
def test_a_reader_that_no_policy_made_eager_is_a_hazard(
    monkeypatch: pytest.MonkeyPatch, program: Callable[..., Any], message: str
) -> None:
    run(program)
    monkeypatch.setattr(PASSES["choose_regions"], "why_reads_step", lambda *_: None)
    with pytest.raises(HazardError, match=message):
        run(program)


def test_views_that_are_not_free_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Effects, "is_view", property(lambda done: False))
    with pytest.raises(PlanError, match="does not run exactly its own nodes"):
        plan()
