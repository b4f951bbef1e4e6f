"""Graphs as text after each pass, for snapshots that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dsv4_compile.config import Config
from dsv4_compile.graph.partitioned import PartitionedGraph, Unit
from dsv4_compile.graph.traced import TracedGraph
from dsv4_compile.inspect.make_plan import call_name, make_plan
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.plan_graph import plan_graph


def stages_of(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[dict[str, str], PartitionedGraph, Plan]:
    """Text after each pass, the partitioned graph and the plan, of the graph traced for `fn(*args)`."""
    texts: dict[str, str] = {}
    found: list[tuple[PartitionedGraph, Plan]] = []
    config = Config.from_options(options)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def observe(stage: str, graph: TracedGraph | PartitionedGraph) -> None:
            texts[stage] = text_of(graph, stage)

        graph = plan_graph(gm, example_inputs, config, observe)
        found.append((graph, make_plan(graph, config)))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=True)(*args)
    return texts, *found[0]


def text_of(graph: TracedGraph | PartitionedGraph, stage: str) -> str:
    """One line a node, with what the stage found out about it; after the partition, one paragraph a unit."""
    if isinstance(graph, PartitionedGraph):
        return "\n".join(map(_unit_text, graph.units))
    nodes = [node for node in graph.gm.graph.nodes if node.op not in ("placeholder", "output")]
    lines = [f"{_call(node):<56}  {_remark(graph, node, stage)}".rstrip() for node in nodes]
    output = fx.node._format_arg(graph.gm.graph.output_node().args[0])
    return "\n".join([*lines, f"return {output}"]).replace("%", "")


def _call(node: fx.Node) -> str:
    args = ", ".join([*map(fx.node._format_arg, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    return f"{node.name} = {call_name(node)}({args})".replace("%", "")


def _remark(traced: TracedGraph, node: fx.Node, stage: str) -> str:
    if stage == "infer_effects":
        return effects_text(traced, node)
    if stage in ("choose_regions", "move_nodes"):
        return traced.eager.get(node, "view" if traced.effects[node].is_view else "captured")
    return ""


def effects_text(traced: TracedGraph, node: fx.Node) -> str:
    """What a node does: "view", or the storages it reads, writes and makes."""
    effects = traced.effects[node]
    parts = [
        f"{verb} {','.join(map(str, sorted(storages)))}"
        for verb, storages in (("reads", effects.reads), ("writes", effects.writes), ("makes", effects.makes))
        if storages
    ]
    flags = [effects.barrier and "barrier", effects.uncapturable, effects.random and "random"]
    return "; ".join([*(["view"] if effects.is_view else []), *parts, *(flag for flag in flags if flag)])


def _unit_text(unit: Unit) -> str:
    inputs = ", ".join(node.name for node in unit.inputs)
    outputs = ", ".join(node.name for node in unit.outputs)
    body = [f"    {_call(node)}" for node in unit.gm.graph.nodes if node.op not in ("placeholder", "output")]
    return "\n".join([f"{unit.name}({inputs}) -> ({outputs})", *body])
