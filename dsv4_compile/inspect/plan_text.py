"""The text of a plan: see `plan.Plan`."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan, PlanOp, PlanSubgraph, PlanUnit, PlanValue, PlanWorkspace
from ..log import pluralize

WIDTH = 120


# Origins of inputs in the order in which they are listed. Weights show in the brackets of the ops that apply them.
_LISTED = ("host scalar", "object", "user input", "step state", "cache", "buffer", "constant")


def render_plan(plan: Plan) -> str:
    """The whole report, no trailing newline."""
    return "\n".join(line.rstrip() for line in _lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan: runner {plan.runner} ({plan.runner_reason}), region {plan.region}"
    yield from _sizes(plan)
    yield _summary(plan)
    if plan.full is not None:
        yield f"uniform decode: 1 piece captured ({pluralize(len(plan.full.unit.ops), 'op')}), nothing eager"
    yield from _compiled(plan)
    for note in plan.notes:
        yield f"note: {note}"
    for unit in plan.units:
        yield ""
        yield from _unit(unit)
    if plan.full is not None:
        yield ""
        yield from _unit(plan.full.unit, " in uniform decode")
    if plan.inputs:
        yield ""
        yield "inputs"
        yield from _inputs(plan.inputs)
    if plan.workspace.slots:
        yield ""
        yield from _workspace(plan, plan.workspace)
    if plan.full is not None and plan.full.workspace.slots:
        yield ""
        yield from _workspace(plan, plan.full.workspace, " in uniform decode")


def _sizes(plan: Plan) -> Iterator[str]:
    named = [f"{symbol} = {source}{' (tokens)' if symbol == plan.tokens else ''}" for symbol, source in plan.sizes]
    if plan.tokens is not None and plan.tokens not in dict(plan.sizes):
        named.append(f"tokens = {plan.tokens}")
    if named:
        yield f"sizes: {', '.join(named)}"
    if plan.scalars:
        yield f"host scalars, part of the bucket: {', '.join(plan.scalars)}"


def _summary(plan: Plan) -> str:
    captured = sum(len(unit.ops) for unit in plan.pieces)
    eager = sum(len(unit.ops) for unit in plan.regions)
    copies = sum(unit.duplicate_of is not None for unit in plan.units)
    same = f", {copies} of them duplicates" if copies else ""
    return (
        f"{pluralize(len(plan.pieces), 'piece')} captured ({pluralize(captured, 'op')}){same}, "
        f"{pluralize(len(plan.regions), 'region')} eager ({pluralize(eager, 'op')})"
    )


def _compiled(plan: Plan) -> Iterator[str]:
    subgraphs = [subgraph for unit in plan.all_units for subgraph in unit.subgraphs]
    if plan.piece_compiler is not None:
        compiled = [subgraph for subgraph in subgraphs if subgraph.uncompiled is None]
        different = sum(subgraph.duplicate_of is None for subgraph in compiled)
        yield (
            f"piece compiler {plan.piece_compiler}: {pluralize(len(compiled), 'subgraph')} compiled "
            f"({different} different), {len(subgraphs) - len(compiled)} left alone"
        )


def _unit(unit: PlanUnit, when: str = "") -> Iterator[str]:
    fate = f"captured{when}" if unit.kind == "piece" else "eager"
    copy = f", a duplicate of {unit.duplicate_of}" if unit.duplicate_of else ""
    streams = sorted({op.stream for op in unit.ops})
    side_by_side = f" on {pluralize(len(streams), 'stream')}" if len(streams) > 1 else ""
    yield f"{unit.name}  {fate}, {pluralize(len(unit.ops), 'op')}{side_by_side}{copy}"
    if unit.kind == "region":
        yield from _eager_ops(unit.ops)
    elif unit.duplicate_of is None:
        for stream in streams:
            label = f"stream {stream} " if len(streams) > 1 else "ops"
            yield from _captured_ops(label, [op.op for op in unit.ops if op.stream == stream])
        yield from _wrapped("subgraphs", [_subgraph(subgraph) for subgraph in unit.subgraphs])
    yield from _unit_inputs(unit.inputs)
    yield from _wrapped("outputs", [f"{value.name} {value.layout}" for value in unit.outputs])


def _subgraph(subgraph: PlanSubgraph) -> str:
    number = subgraph.name.rpartition(".")[2]
    if subgraph.uncompiled is not None:
        return f"{number} as it is ({pluralize(subgraph.nodes, 'op')}: {subgraph.uncompiled})"
    same = f", as {subgraph.duplicate_of}" if subgraph.duplicate_of else ""
    return f"{number} compiled ({pluralize(subgraph.nodes, 'op')}{same})"


def _captured_ops(label: str, ops: Sequence[str]) -> Iterator[str]:
    runs = itertools.groupby(ops)
    yield from _wrapped(label, [_repeated(op, len(list(run))) for op, run in runs])


def _eager_ops(ops: Sequence[PlanOp]) -> Iterator[str]:
    width = max(len(op.op) for op in ops)
    for op in ops:
        yield f"    {op.op:<{width}}  {op.reason}"


def _repeated(op: str, times: int) -> str:
    return op if times == 1 else f"{op} x{times}"


def _unit_inputs(values: Sequence[PlanValue]) -> Iterator[str]:
    """What other units made first, then the graph's inputs by origin."""
    label = "inputs"
    for origin in ("activation", *_LISTED):
        names = [value.name for value in values if value.origin == origin]
        if names:
            yield from _wrapped(label, names, "" if origin == "activation" else f"{origin}: ")
            label = ""


def _wrapped(label: str, items: Sequence[str], prefix: str = "") -> Iterator[str]:
    if items:
        yield from textwrap.wrap(
            prefix + ", ".join(items),
            WIDTH,
            initial_indent=f"    {label:<10}",
            subsequent_indent=" " * 14,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _workspace(plan: Plan, workspace: PlanWorkspace, when: str = "") -> Iterator[str]:
    """One line a slot, by offset: who shares an address with whom shows at a glance."""
    at = ", ".join(f"{symbol} = {value}" for symbol, value in plan.traced_sizes)
    yield f"workspace{when}{f' at {at}' if at else ''}"
    yield (
        f"    {workspace.planned} bytes planned, {workspace.lower_bound} is the lower bound, "
        f"{workspace.unshared} if nothing were shared"
    )
    for slot in sorted(workspace.slots, key=lambda slot: slot.offset):
        yield f"    {slot.offset:>8}  {slot.name} ({slot.nbytes} bytes, {slot.first} to {slot.last})"


def _inputs(inputs: Sequence[PlanValue]) -> Iterator[str]:
    weights = [value for value in inputs if value.origin == "weight"]
    for origin in _LISTED:
        values = [f"{value.name} {value.layout}" for value in inputs if value.origin == origin]
        if values:
            yield f"    {origin}"
            yield from (f"        {value}" for value in values)
    if weights:
        yield f"    weight: {pluralize(len(weights), 'tensor')}"
