"""Read back what `artifacts` wrote: a `graph_<n>` folder, or a dump folder with several of them.

Nothing here needs the model: the records of `plan.json` become a `Plan` again, everything else stays text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import ExplainError
from ..plan import Plan, PlanFull, PlanOp, PlanSlot, PlanSubgraph, PlanUnit, PlanValue, PlanWorkspace

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")

_STAGE = re.compile(r"(\d+)_(\w+)\.py")
_UNIT = re.compile(r"(?:(piece|region)_\d+|whole_step)\.py")
_HEADER = re.compile(r"# \w+: (\d+) nodes \(([+-]\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The graph after one pass.

    Attributes:
        file: name of the file in the folder.
        name: of the pass; "dynamo" for the graph as it came.
        nodes, delta: how many nodes it has, and how many more than before.
        code: the graph's code.
    """

    file: str
    name: str
    nodes: int
    delta: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedGraph:
    """One compiled graph.

    Attributes:
        name: of its folder.
        plan: what became of it.
        stages: the graph before the first pass and after each, in order.
        unit_code: code by the name of the piece or region.
        programs: file name and code of each captured program.
    """

    name: str
    plan: Plan
    stages: tuple[Stage, ...]
    unit_code: Mapping[str, str]
    programs: tuple[tuple[str, str], ...]


def read_dump(folder: Path) -> tuple[DumpedGraph, ...]:
    """The graphs of a dump folder by number, or the one graph of a `graph_<n>` folder.

    A graph folder without a plan is that of a compilation that failed or still runs; it is left out beside others.

    Raises:
        ExplainError: there is no such folder, no graph with a plan in it, or a file in it cannot be read as a dump.
    """
    if not folder.is_dir():
        raise ExplainError(f"{str(folder)!r} is not a folder: give the one named by the option dump_dir")
    if (folder / "plan.json").is_file():
        return (_read_graph(folder),)
    graphs = sorted((path for path in folder.glob("graph_*") if path.is_dir()), key=_number)
    planned = [path for path in graphs if (path / "plan.json").is_file()]
    if graphs and not planned:
        raise ExplainError(f"no graph in {str(folder)!r} has a plan.json: compiling stopped before there was a plan")
    if not planned:
        raise ExplainError(f"{str(folder)!r} is not a dump: it has no plan.json and no graph_<n> (see option dump_dir)")
    return tuple(_read_graph(path) for path in planned)


def _number(path: Path) -> tuple[int, str]:
    digits = path.name.removeprefix("graph_")
    return (int(digits) if digits.isdecimal() else -1, path.name)


def _read_graph(folder: Path) -> DumpedGraph:
    try:
        plan = plan_from_json(_text(folder / "plan.json"))
        stages = [_stage(path, match) for path in sorted(folder.glob("*.py")) if (match := _STAGE.fullmatch(path.name))]
        code = {path.stem: _text(path) for path in folder.glob("*.py") if _UNIT.fullmatch(path.name)}
        programs = tuple((path.name, _text(path)) for path in sorted(folder.glob("program_*.py")))
    except OSError as error:
        raise ExplainError(f"cannot read {str(folder)!r}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExplainError(f"{str(folder / 'plan.json')!r} is no plan of this version: {error}") from error
    return DumpedGraph(name=folder.resolve().name, plan=plan, stages=tuple(stages), unit_code=code, programs=programs)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _stage(path: Path, match: re.Match[str]) -> Stage:
    header, _, code = _text(path).partition("\n")
    counted = _HEADER.match(header)
    nodes, delta = (int(counted[1]), int(counted[2])) if counted else (0, 0)
    return Stage(file=path.name, name=match[2], nodes=nodes, delta=delta, code=code.strip("\n"))


def plan_from_json(text: str) -> Plan:
    """The plan that `Plan.to_json` wrote.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not one.
    """
    fields = _fields(Plan, json.loads(text))
    return Plan(
        **{
            **fields,
            "sizes": tuple((str(symbol), str(source)) for symbol, source in fields["sizes"]),
            "scalars": tuple(fields["scalars"]),
            "units": tuple(_unit(unit) for unit in fields["units"]),
            "inputs": _records(PlanValue, fields["inputs"]),
            "traced_sizes": tuple((str(symbol), int(size)) for symbol, size in fields["traced_sizes"]),
            "workspace": _workspace(fields["workspace"]),
            "notes": tuple(fields["notes"]),
            "full": None if fields["full"] is None else _full(fields["full"]),
        }
    )


def _full(raw: object) -> PlanFull:
    fields = _fields(PlanFull, raw)
    return PlanFull(unit=_unit(fields["unit"]), workspace=_workspace(fields["workspace"]))


def _unit(raw: object) -> PlanUnit:
    fields = _fields(PlanUnit, raw)
    records = {"ops": PlanOp, "inputs": PlanValue, "outputs": PlanValue, "subgraphs": PlanSubgraph}
    return PlanUnit(**{**fields, **{name: _records(record, fields[name]) for name, record in records.items()}})


def _workspace(raw: object) -> PlanWorkspace:
    fields = _fields(PlanWorkspace, raw)
    return PlanWorkspace(**{**fields, "slots": _records(PlanSlot, fields["slots"])})


def _records(record: type[Record], raw: Iterable[object]) -> tuple[Record, ...]:
    return tuple(record(**_fields(record, item)) for item in raw)


def _fields(record: type[DataclassInstance], raw: object) -> dict[str, Any]:
    """The attributes of a record; what a later version may have added is not shown."""
    if not isinstance(raw, dict):
        raise TypeError(f"{record.__name__} is not an object")
    missing = [field.name for field in dataclasses.fields(record) if field.name not in raw]
    if missing:
        raise KeyError(f"{record.__name__} has no {', '.join(missing)}")
    return {field.name: raw[field.name] for field in dataclasses.fields(record)}
