"""The streams of a piece as a table: a row is a step, and ops in one row may run side by side.

An op stands in the first row that is below all that it must come after, and below the op before it on its stream. Under
the table are the events: who waits for whom, and what stream 0 waits for at the end.
"""

from __future__ import annotations

import re

import torch
from layer_plans import mark_request_dims
from paging import Paging, tiny_config
from stages import stages_of

from dsv4_compile.analysis.stream_schedule import Events, events_of
from dsv4_compile.graph.partitioned import PartitionedGraph, Unit
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.models.deepseek_v4 import DeepseekV4Attention, DeepseekV4Config
from dsv4_compile.passes.assign_streams import order_of


def layer_graph(ratio: int, streams: int, config: DeepseekV4Config | None = None) -> tuple[PartitionedGraph, Plan]:
    """One layer under mrv2, narrow; ratio 0 is SWA, 4 C4A, 128 C128A. Its weights have sizes and no values."""
    config = config or tiny_config((ratio,))
    paging = Paging(config, [40, 40], max_reqs=3)
    with torch.device("meta"):
        layer = DeepseekV4Attention(config, 0)
    layer = layer.to_empty(device="cpu")
    layer.bind(paging.caches()[0])
    positions, step = paging.step([(0, 0, 5), (1, 0, 8)])
    hidden = torch.zeros(13, config.hidden_size)
    _, graph, plan = stages_of(layer, hidden, positions, mark_request_dims(step), runner="mrv2", aux_streams=streams)
    return graph, plan


def streams_of(graph: PartitionedGraph, unit: Unit) -> list[int]:
    return [graph.streams.get(node, 0) for node in unit.nodes]


def unit_events(graph: PartitionedGraph, unit: Unit) -> Events:
    return events_of(order_of(unit.nodes, graph.traced.effects), streams_of(graph, unit))


def short(op: str) -> str:
    """ "indexer.wq_b" of "linear[indexer.wq_b.weight]", "compress_kv_insert compressor" of that with its ape."""
    name, _, weight = op.removesuffix("]").partition("[")
    owner = re.sub(r"^layers\.\d+\.(attention\.)?", "", f"{weight.rpartition('.')[0]}.").removesuffix(".")
    return owner if name == "linear" else f"{name.removeprefix('dsv4::')} {owner}".strip()


def table(graph: PartitionedGraph, plan: Plan, index: int = 0) -> str:
    unit, names = graph.units[index], [short(op.op) for op in plan.units[index].ops]
    streams, events, before = (
        streams_of(graph, unit),
        unit_events(graph, unit),
        order_of(unit.nodes, graph.traced.effects),
    )
    rows: list[int] = []
    for op, stream in enumerate(streams):
        above = [rows[other] for other in range(op) if other in before[op] or streams[other] == stream]
        rows.append(max(above, default=-1) + 1)
    cells = {(row, stream): name for row, stream, name in zip(rows, streams, names, strict=True)}
    columns = [
        [f"stream {n}", *(cells.get((row, n), "") for row in range(max(rows) + 1))] for n in range(max(streams) + 1)
    ]
    widths = [max(map(len, column)) + 3 for column in columns]
    lines = ["".join(map(str.ljust, line, widths)) for line in zip(*columns, strict=True)]
    for op, waits in enumerate(events.waits):
        lines += [f"{names[op]} waits for {'the start' if other < 0 else names[other]}" for other in waits]
    lines += [f"joined: {', '.join(names[op] for op in events.joins)}"] if events.joins else []
    return "\n".join(line.rstrip() for line in lines)
