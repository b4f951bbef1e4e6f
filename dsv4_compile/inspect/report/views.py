"""What the report draws, computed from a `Plan`: rows of the timeline, boxes of the workspace map, groups of inputs."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..plan import Plan, PlanOp, PlanUnit, PlanValue
from .readable import model_name, name_table, short_line

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One op of the timeline: its short name, and what shows when one points at it."""

    label: str
    detail: str
    eager: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCells:
    """The ops that one unit has in one layer."""

    unit: PlanUnit
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer of the timeline, in program order."""

    label: str
    units: tuple[UnitCells, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A value on the workspace map.

    Attributes:
        x, y, width, height: in per cent of the map.
        colour: a CSS colour.
        name, nbytes, offset, first, last: as in `PlanSlot`.
    """

    x: float
    y: float
    width: float
    height: float
    colour: str
    name: str
    nbytes: int
    offset: int
    first: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """Inputs that differ in nothing but the layer: "layers.N.norm.weight"."""

    name: str
    layout: str
    count: int
    used_by: str


def timeline(plan: Plan) -> tuple[Row, ...]:
    """One row for each stretch of ops that belong to one layer.

    An op belongs to the layer whose weight it applies, and one without a weight to that of the op before it. The
    number of a layer is the first number in the weight's name.
    """
    ops = list(_ops_by_layer(plan))
    rows = []
    for label, stretch in itertools.groupby(ops, key=lambda item: item[0]):
        members = [(unit, op) for _, unit, op in stretch]
        rows.append(Row(label=label, units=tuple(_units(members))))
    return tuple(rows)


def _units(members: Sequence[tuple[PlanUnit, PlanOp]]) -> Iterator[UnitCells]:
    for _, items in itertools.groupby(members, key=lambda item: item[0].name):
        same = list(items)
        unit = same[0][0]
        cells = (_cell(op, eager=unit.kind == "region") for _, op in same)
        yield UnitCells(unit=unit, cells=tuple(cells))


def _ops_by_layer(plan: Plan) -> Iterator[tuple[str, PlanUnit, PlanOp]]:
    layered = any(_LAYER.search(value.name) for value in plan.inputs if value.origin == "weight")
    label = "before the layers" if layered else "the whole graph"
    for unit in plan.units:
        for op in unit.ops:
            if layered and op.weight is not None:
                layer = _LAYER.search(op.weight)
                started = label != "before the layers"
                label = f"layer {layer[1]}" if layer else "after the layers" if started else label
            yield label, unit, op


def _cell(op: PlanOp, *, eager: bool) -> Cell:
    fate = f"eager, because: {op.reason}" if eager else f"captured{f', stream {op.stream}' if op.stream else ''}"
    detail = f"{op.op} — {fate} — {short_line(op.line)}" if op.line else f"{op.op} — {fate}"
    return Cell(label=op.name.rpartition("::")[2], detail=detail, eager=eager)


def workspace_map(plan: Plan) -> tuple[Box, ...]:
    """One box for each value: bytes from top to bottom, program order from left to right."""
    columns = ["start", *(unit.name for unit in plan.units), "end"]
    column_of = {name: index for index, name in enumerate(columns)}
    size = max(plan.workspace.planned, 1)
    names = name_table(value.name for value in plan.inputs)
    return tuple(
        Box(
            x=100 * column_of[slot.first] / len(columns),
            width=100 * (column_of[slot.last] - column_of[slot.first] + 1) / len(columns),
            y=100 * slot.offset / size,
            height=100 * slot.nbytes / size,
            colour=f"hsl({index * 137.5 % 360:.0f} 55% 72%)",  # the golden angle keeps neighbours apart
            name=model_name(slot.name, names),
            nbytes=slot.nbytes,
            offset=slot.offset,
            first=slot.first,
            last=slot.last,
        )
        for index, slot in enumerate(plan.workspace.slots)
    )


def input_groups(plan: Plan, origins: Sequence[str]) -> tuple[tuple[str, tuple[InputRow, ...]], ...]:
    """Inputs by provenance, in the order of `origins`, then whatever else there is."""
    users: dict[str, list[str]] = defaultdict(list)
    for unit in plan.units:
        for value in unit.inputs:
            users[value.name].append(unit.name)
    found = {value.origin for value in plan.inputs}
    order = [*(origin for origin in origins if origin in found), *sorted(found.difference(origins))]
    return tuple(
        (origin, _input_rows([value for value in plan.inputs if value.origin == origin], users)) for origin in order
    )


def _input_rows(values: Sequence[PlanValue], users: dict[str, list[str]]) -> tuple[InputRow, ...]:
    alike: dict[tuple[str, str], list[PlanValue]] = defaultdict(list)
    for value in values:
        alike[_NUMBER.sub("N", value.name), value.layout].append(value)
    return tuple(
        InputRow(
            name=members[0].name if len(members) == 1 else name,
            layout=layout,
            count=len(members),
            used_by=listed(list(dict.fromkeys(user for member in members for user in users[member.name]))),
        )
        for (name, layout), members in alike.items()
    )


def listed(names: Sequence[str], at_most: int = 6) -> str:
    """ "a, b, c", or the first few and how many more there are."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")
