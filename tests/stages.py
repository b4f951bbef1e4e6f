"""Graphs as text after each pass, for snapshots that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dsv4_compile.backend import plan_graph
from dsv4_compile.config import Config
from dsv4_compile.draft import Draft
from dsv4_compile.make_plan import call_name
from dsv4_compile.plan import Plan


def drafts_of(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[dict[str, str], Draft, Plan]:
    """Text after each pass, the final draft and the plan, of the graph traced for `fn(*args)`."""
    texts: dict[str, str] = {}
    found: list[tuple[Draft, Plan]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def observe(stage: str, draft: Draft) -> None:
            texts[stage] = text_of(draft, stage)

        found.append(plan_graph(gm, example_inputs, Config.from_options(options), observe))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=True)(*args)
    return texts, *found[0]


def text_of(draft: Draft, stage: str) -> str:
    """One line a node, with what the stage found out about it."""
    if stage in ("partition_graph", "check_partition", "find_copies"):
        return "\n".join(_unit_text(draft, index) for index in range(len(draft.units)))
    nodes = [node for node in draft.gm.graph.nodes if node.op not in ("placeholder", "output")]
    lines = [f"{_call(node):<56}  {_remark(draft, node, stage)}".rstrip() for node in nodes]
    output = fx.node._format_arg(draft.gm.graph.output_node().args[0])
    return "\n".join([*lines, f"return {output}"]).replace("%", "")


def _call(node: fx.Node) -> str:
    args = ", ".join([*map(fx.node._format_arg, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    return f"{node.name} = {call_name(node)}({args})".replace("%", "")


def _remark(draft: Draft, node: fx.Node, stage: str) -> str:
    if stage == "infer_effects":
        return effects_text(draft, node)
    if stage in ("choose_regions", "move_nodes"):
        return draft.eager.get(node, "free" if draft.effects[node].is_free else "captured")
    return ""


def effects_text(draft: Draft, node: fx.Node) -> str:
    """What a node does: "free", or the storages it reads, writes and makes."""
    effects = draft.effects[node]
    parts = [
        f"{verb} {','.join(map(str, sorted(storages)))}"
        for verb, storages in (("reads", effects.reads), ("writes", effects.writes), ("makes", effects.makes))
        if storages
    ]
    flags = [effects.barrier and "barrier", effects.uncapturable, effects.random and "random"]
    return "; ".join([*(["free"] if effects.is_free else []), *parts, *(flag for flag in flags if flag)])


def _unit_text(draft: Draft, index: int) -> str:
    unit = draft.units[index]
    inputs = ", ".join(node.name for node in unit.inputs)
    outputs = ", ".join(node.name for node in unit.outputs)
    body = [f"    {_call(node)}" for node in unit.gm.graph.nodes if node.op not in ("placeholder", "output")]
    return "\n".join([f"{unit.name}({inputs}) -> ({outputs})", *body])
