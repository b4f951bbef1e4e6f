"""The report: one HTML page, with nothing to load from elsewhere, that shows what became of a model's graph.

It is made from the files of a dump (see `dump_folder`), so that it can be made again, on another machine, with the
programs that were captured since. Every text from the dump is escaped by the template. What would make a page too
long to open is cut, and the page says where the rest is.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from ...errors import ExplainError
from ...log import pluralize
from ..plan import Plan, PlanUnit
from .dump_folder import DumpedGraph, Stage, read_dump
from .readable import changed_lines, name_table, readable, skeleton
from .views import Box, InputRow, Row, input_groups, listed, timeline, workspace_map

CODE_LINES = 400
DIFF_LINES = 120
PROGRAMS = 3
ORIGINS = {
    "user input": "Arguments of the call. One that a captured piece reads is copied into the workspace first.",
    "host scalar": "Plain numbers of the call. A captured graph holds them, so other numbers make another recording.",
    "step state": "What the model runner fills in for every step: where tokens go in the caches, how long each request "
    "is. The old runner (mrv1) makes new tensors for it, so only eager ops may read it; the new one (mrv2) keeps it in "
    "buffers that stay in place.",
    "cache": "Buffers that the graph writes, such as KV caches. Captured graphs hold their addresses.",
    "buffer": "Tensors of the model that the graph only reads, such as tables of rotary angles.",
    "constant": "Tensors that the code made once while it was traced.",
    "weight": "Parameters of the model, read where they are.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Code to show, cut to a length that a page can hold.

    Attributes:
        lines: what is shown.
        left_out: how many lines are not.
        file: where all of it is.
    """

    lines: tuple[str, ...]
    left_out: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitView:
    """A piece or region that stands for all that are like it."""

    unit: PlanUnit
    others: str
    code: Code | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassView:
    """One pass: what it is for, what it changed."""

    stage: Stage
    purpose: str
    changed: bool
    diff: Code


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphView:
    """Everything the page shows of one graph."""

    name: str
    plan: Plan
    has_copies: bool
    rows: tuple[Row, ...]
    boxes: tuple[Box, ...]
    inputs: tuple[tuple[str, tuple[InputRow, ...]], ...]
    units: tuple[UnitView, ...]
    first_code: Code | None
    passes: tuple[PassView, ...]
    programs: tuple[Code, ...]
    programs_left_out: int


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the page for a dump folder, or for one graph's folder in it, and return where it is.

    Args:
        folder: as for `read_dump`.
        output: the file to write; `report.html` in the folder if None.

    Raises:
        ExplainError: there is no dump there, or the file cannot be written.
    """
    page = render_report(read_dump(folder))
    target = folder / "report.html" if output is None else output
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ExplainError(
            f"cannot write {str(target)!r}: {error.strerror}; give another file with --output"
        ) from error
    return target


def render_report(graphs: Sequence[DumpedGraph]) -> str:
    """The page as text."""
    template = template_environment().get_template("report.html.j2")
    return template.render(graphs=[_view(graph) for graph in graphs], origins=ORIGINS)


def template_environment() -> jinja2.Environment:
    """What templates of this folder are rendered with; every text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = readable_bytes
    environment.globals["pluralize"] = pluralize
    return environment


def readable_bytes(count: int) -> str:
    """ "512 B", "68.0 KiB", "2.3 MiB"."""
    if count < 1024:
        return f"{count} B"
    size, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


def _view(graph: DumpedGraph) -> GraphView:
    names = name_table(value.name for value in graph.plan.inputs)
    first = graph.stages[0] if graph.stages else None
    return GraphView(
        name=graph.name,
        plan=graph.plan,
        has_copies=any(unit.duplicate_of for unit in graph.plan.units),
        rows=timeline(graph.plan),
        boxes=workspace_map(graph.plan),
        inputs=input_groups(graph.plan, tuple(ORIGINS)),
        units=_units(graph, names),
        first_code=None if first is None else _cut(readable(first.code, names).splitlines(), CODE_LINES, first.file),
        passes=_passes(graph.stages, names),
        programs=tuple(_cut(code.splitlines(), CODE_LINES, file) for file, code in graph.programs[:PROGRAMS]),
        programs_left_out=max(len(graph.programs) - PROGRAMS, 0),
    )


def _cut(lines: Sequence[str], limit: int, file: str) -> Code:
    return Code(lines=tuple(lines[:limit]), left_out=max(len(lines) - limit, 0), file=file)


def _units(graph: DumpedGraph, names: Mapping[str, str]) -> tuple[UnitView, ...]:
    """Each unit that is no copy; regions, which are never copies for the compiler, are told apart by their code."""
    alike: dict[str, list[PlanUnit]] = defaultdict(list)
    for unit in graph.plan.all_units:
        if unit.kind == "piece":
            alike[unit.duplicate_of or unit.name].append(unit)
        else:
            alike[skeleton(graph.unit_code.get(unit.name, unit.name))].append(unit)
    return tuple(_unit_view(graph, members, names) for members in alike.values())


def _unit_view(graph: DumpedGraph, members: Sequence[PlanUnit], names: Mapping[str, str]) -> UnitView:
    unit = members[0]
    code = graph.unit_code.get(unit.name)
    shown = None if code is None else _cut(readable(code, names).splitlines(), CODE_LINES, f"{unit.name}.py")
    return UnitView(unit=unit, others=listed([other.name for other in members[1:]], 12), code=shown)


def _passes(stages: Sequence[Stage], names: Mapping[str, str]) -> tuple[PassView, ...]:
    views = []
    for before, after in itertools.pairwise(stages):
        changed = before.code != after.code
        diff = changed_lines(readable(before.code, names), readable(after.code, names)) if changed else []
        views.append(
            PassView(
                stage=after, purpose=_purpose(after.name), changed=changed, diff=_cut(diff, DIFF_LINES, after.file)
            )
        )
    return tuple(views)


def _purpose(name: str) -> str:
    """The first line of what the pass says about itself; nothing for a pass of another version."""
    import dsv4_compile.passes  # noqa: F401  loads all of them

    module = sys.modules.get(f"dsv4_compile.passes.{name}")
    return (getattr(module, "__doc__", None) or "").partition("\n")[0]
