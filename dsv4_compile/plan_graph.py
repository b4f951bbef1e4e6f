"""From Dynamo's graph to the partitioned one: the trace and the passes, nothing compiled or captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from .analysis.eager_reasons import alike
from .compat.dynamo import concrete_fake_inputs, graph_break_reason, resized_fake_inputs, symbolic_fake_inputs
from .config import Config
from .graph.partitioned import PartitionedGraph
from .graph.traced import FakeInputs, SizeValues, TracedGraph, Value
from .graph.tracing import trace_graph
from .ops.registry import snapshot, with_split_ops
from .passes import (
    Observer,
    partition_graph,
    partitioned_passes,
    pass_name,
    region_passes,
    run_passes,
    traced_passes,
)


def plan_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Value], config: Config, observe: Observer
) -> PartitionedGraph:
    """Compute what becomes of a graph.

    Args:
        gm: the graph Dynamo traced; it is not changed.
        example_inputs: one real tensor or SymInt per placeholder.
        config: the options.
        observe: is shown the graph after each pass.
    """
    ops = with_split_ops(snapshot(), config.split_ops)
    traced = trace_graph(gm, example_inputs, ops, graph_break_reason(gm))

    def concrete() -> FakeInputs:
        mode, values = concrete_fake_inputs(example_inputs, traced.traced_sizes)
        return FakeInputs(mode=mode, values=values, concrete=True)

    def symbolic() -> FakeInputs:
        mode, values = symbolic_fake_inputs(example_inputs, gm)
        return FakeInputs(mode=mode, values=values, concrete=False)

    def resized(sizes: SizeValues) -> FakeInputs:
        mode, values = resized_fake_inputs([graph_input.value for graph_input in traced.inputs], sizes)
        return FakeInputs(mode=mode, values=values, concrete=True)

    observe("dynamo", traced)
    return _partitioned(
        run_passes(traced, traced_passes(config, concrete, symbolic, resized), observe), config, observe
    )


def plan_again(
    graph: PartitionedGraph, refused: Mapping[fx.Node, str], config: Config, observe: Observer
) -> PartitionedGraph:
    """Compute it anew, once captures have shown what no graph can hold.

    Args:
        graph: as it was planned.
        refused: what nodes do that was refused. Whatever calls the same custom op is eager too: it would be next.
        config, observe: as in `plan_graph`.
    """
    known = {**graph.traced.refused, **alike(graph.traced, refused)}
    traced = run_passes(replace(graph.traced, refused=known), region_passes(config), observe)
    return _partitioned(replace(traced, notes=tuple(dict.fromkeys(traced.notes))), config, observe)


def _partitioned(traced: TracedGraph, config: Config, observe: Observer) -> PartitionedGraph:
    graph = partition_graph(traced)
    observe(pass_name(partition_graph), graph)
    return run_passes(graph, partitioned_passes(config), observe)
