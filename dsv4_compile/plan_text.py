"""The text of a plan: see `plan.Plan`."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan, PlanOp, PlanPart, PlanUnit, PlanValue

WIDTH = 120
# Origins of inputs in the order in which they are listed. Weights show in the brackets of the ops that apply them.
_LISTED = ("host scalar", "user input", "step state", "cache", "buffer", "constant")


def render_plan(plan: Plan) -> str:
    """The whole report, no trailing newline."""
    return "\n".join(line.rstrip() for line in _lines(plan))


def counted(number: int, noun: str) -> str:
    """ "1 op", "2 ops"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan: runner {plan.runner} ({plan.runner_reason}), region {plan.region}"
    yield from _sizes(plan)
    yield _summary(plan)
    yield from _compiled(plan)
    for note in plan.notes:
        yield f"note: {note}"
    for unit in plan.units:
        yield ""
        yield from _unit(unit)
    if plan.inputs:
        yield ""
        yield "inputs"
        yield from _inputs(plan.inputs)
    if plan.workspace.slots:
        yield ""
        yield from _workspace(plan)


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
    copies = sum(unit.copy_of is not None for unit in plan.units)
    same = f", {copies} of them copies" if copies else ""
    return (
        f"{counted(len(plan.pieces), 'piece')} captured ({counted(captured, 'op')}){same}, "
        f"{counted(len(plan.regions), 'region')} eager ({counted(eager, 'op')})"
    )


def _compiled(plan: Plan) -> Iterator[str]:
    parts = [part for unit in plan.units for part in unit.parts]
    if plan.piece_compiler is not None:
        compiled = [part for part in parts if part.uncompiled is None]
        different = sum(part.copy_of is None for part in compiled)
        yield (
            f"piece compiler {plan.piece_compiler}: {counted(len(compiled), 'part')} compiled ({different} different), "
            f"{len(parts) - len(compiled)} left alone"
        )


def _unit(unit: PlanUnit) -> Iterator[str]:
    fate = "captured" if unit.kind == "piece" else "eager"
    copy = f", a copy of {unit.copy_of}" if unit.copy_of else ""
    lanes = sorted({op.lane for op in unit.ops})
    side_by_side = f" on {counted(len(lanes), 'lane')}" if len(lanes) > 1 else ""
    yield f"{unit.name}  {fate}, {counted(len(unit.ops), 'op')}{side_by_side}{copy}"
    if unit.kind == "region":
        yield from _eager_ops(unit.ops)
    elif unit.copy_of is None:
        for lane in lanes:
            label = f"lane {lane} " if len(lanes) > 1 else "ops"
            yield from _captured_ops(label, [op.op for op in unit.ops if op.lane == lane])
        yield from _wrapped("parts", [_part(part) for part in unit.parts])
    yield from _takes(unit.takes)
    yield from _wrapped("gives", [f"{value.name} {value.layout}" for value in unit.gives])


def _part(part: PlanPart) -> str:
    number = part.name.rpartition(".")[2]
    if part.uncompiled is not None:
        return f"{number} as it is ({counted(part.nodes, 'op')}: {part.uncompiled})"
    same = f", as {part.copy_of}" if part.copy_of else ""
    return f"{number} compiled ({counted(part.nodes, 'op')}{same})"


def _captured_ops(label: str, ops: Sequence[str]) -> Iterator[str]:
    runs = itertools.groupby(ops)
    yield from _wrapped(label, [_repeated(op, len(list(run))) for op, run in runs])


def _eager_ops(ops: Sequence[PlanOp]) -> Iterator[str]:
    width = max(len(op.op) for op in ops)
    for op in ops:
        yield f"    {op.op:<{width}}  {op.reason}"


def _repeated(op: str, times: int) -> str:
    return op if times == 1 else f"{op} x{times}"


def _takes(values: Sequence[PlanValue]) -> Iterator[str]:
    """What other units made first, then the graph's inputs by origin."""
    label = "takes"
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
            initial_indent=f"    {label:<7}",
            subsequent_indent=" " * 11,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _workspace(plan: Plan) -> Iterator[str]:
    """One line a slot, by offset: who shares an address with whom shows at a glance."""
    workspace = plan.workspace
    at = ", ".join(f"{symbol} = {value}" for symbol, value in plan.traced_sizes)
    yield f"workspace{f' at {at}' if at else ''}"
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
        yield f"    weight: {counted(len(weights), 'tensor')}"
