"""A picture of plans side by side, as SVG: what a call launches one by one, and what it replays, under each policy.

Made for one layer of a model, where every op is a box that can be read. It is drawn from the plans alone, loads
nothing, and the same plans give the same bytes, so a committed picture can be compared with the code that drew it.
Colours follow the reader's light or dark theme, on a background of its own: where the viewer does not tell the theme,
the picture stays readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from dsv4_compile.inspect.plan import Plan, PlanOp, PlanUnit
from dsv4_compile.log import pluralize

WIDTH, MARGIN, GAP = 920, 16, 12
HEADING, LEGEND = 116, 30  # heights above and below the columns
BOX, BETWEEN, TITLE, PADDING = 19, 3, 19, 5  # of an op, the gap under it, a unit's title, its inner margin
LETTERS = 30  # that fit into a box

_STYLE = """\
:root { --page: #ffffff; --line: #d0d7de; --ink: #1f2328; --soft: #59636e; --piece: #ddf0ff; --piece-edge: #2a78bd;
  --region: #fff1dc; --must: #f7b955; --between: #fff8ee; --region-edge: #a85c00; --plain: #eaeef2;
  --plain-edge: #7d8893; }
@media (prefers-color-scheme: dark) { :root { --page: #12171d; --line: #3d444d; --ink: #e8edf2; --soft: #a3adb8;
  --piece: #17344f; --piece-edge: #6db3f2; --region: #3b2a12; --must: #8a5609; --between: #2b2419;
  --region-edge: #f0ab4e; --plain: #262d35; --plain-edge: #8b96a2; } }
text { font: 11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.title { font-size: 17px; font-weight: 600; } .heading { font-size: 13.5px; font-weight: 600; }
.soft { fill: var(--soft); } .unit { font-weight: 600; }
rect { stroke-width: 1; } .page { fill: var(--page); stroke: var(--line); }
.piece { fill: var(--piece); stroke: var(--piece-edge); stroke-width: 2; }
.captured { fill: var(--page); stroke: var(--piece-edge); stroke-opacity: .45; }
.region { fill: var(--region); stroke: var(--region-edge); stroke-dasharray: 2 3; }
.must { fill: var(--must); stroke: var(--region-edge); }
.between { fill: var(--between); stroke: var(--region-edge); stroke-dasharray: 4 3; }
.none { fill: none; stroke: var(--line); } .plain { fill: var(--plain); stroke: var(--plain-edge); }"""

_SUBTITLE = (
    "Time runs from top to bottom. What is in a blue frame is replayed as one; elsewhere Python launches every op."
)
_LEGEND = (
    ("plain", "no compiler"),
    ("piece", "captured once, then replayed"),
    ("must", "eager: it has to be"),
    ("between", "eager: lies in between"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """One op: its CSS class, its label, and what a viewer shows when one points at it."""

    css: str
    label: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The ops of one unit."""

    css: str
    title: str
    boxes: tuple[_Box, ...]

    @property
    def height(self) -> int:
        return TITLE + len(self.boxes) * (BOX + BETWEEN) + PADDING


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One way to run the layer, from top to bottom."""

    heading: str
    notes: tuple[str, str]
    frames: tuple[_Frame, ...]

    @property
    def height(self) -> int:
        return sum(frame.height + GAP for frame in self.frames)


def draw_plans(title: str, before: Plan, after: Mapping[str, Plan]) -> str:
    """One column for the ops without a compiler, and one for each plan; program order runs from top to bottom.

    Args:
        title: what the columns have in common.
        before: a plan that moved no op (any region but "minimal"), for the order of the first column.
        after: plans by the heading of their column; three fit.

    Returns:
        The text of an SVG file.
    """
    columns = [_uncompiled(before), *(_column(heading, plan) for heading, plan in after.items())]
    height = HEADING + max(column.height for column in columns) + LEGEND
    step = (WIDTH - 2 * MARGIN + GAP) // len(columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(MARGIN, 31, title, "title"),
        _text(MARGIN, 50, _SUBTITLE, "soft"),
        *(part for index, column in enumerate(columns) for part in _draw(column, MARGIN + index * step, step - GAP)),
        *_draw_legend(height - 13),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _uncompiled(plan: Plan) -> _Column:
    ops = [op for unit in plan.units for op in unit.ops]
    boxes = tuple(_Box(css="plain", label=short_label(op), hint=op.op) for op in ops)
    frame = _Frame(css="none", title="every op on its own", boxes=boxes)
    return _Column(heading="Before: plain PyTorch", notes=("no capture", f"{len(ops)} ops launched"), frames=(frame,))


def _column(heading: str, plan: Plan) -> _Column:
    launched = sum(len(region.ops) for region in plan.regions)
    work = f"{pluralize(len(plan.pieces), 'replay')} + {pluralize(launched, 'op')} launched"
    frames = tuple(_frame(unit) for unit in plan.units)
    return _Column(heading=heading, notes=(f"runner={plan.runner}, region={plan.region}", work), frames=frames)


def _frame(unit: PlanUnit) -> _Frame:
    fate = "one replay" if unit.kind == "piece" else "run one by one"
    title = f"{unit.name}: {pluralize(len(unit.ops), 'op')}, {fate}"
    return _Frame(css=unit.kind, title=title, boxes=tuple(_box(op) for op in unit.ops))


def _box(op: PlanOp) -> _Box:
    if op.reason is None:
        return _Box(css="captured", label=short_label(op), hint=f"{op.op}: captured")
    css = "between" if op.reason.startswith("wide: ") else "must"
    return _Box(css=css, label=short_label(op), hint=f"{op.op}: eager, {op.reason}")


def short_label(op: PlanOp) -> str:
    """The name of an op and of the module whose weight it applies, cut to fit: "linear indexer…fused_wkv_wgate"."""
    name = op.name.rpartition("::")[2]
    path = (op.weight or "").split(".")[:-1]
    if not path:
        return name
    for module in (".".join(path), f"{path[0]}…{path[-1]}"):
        if len(name) + 1 + len(module) <= LETTERS:
            return f"{name} {module}"
    return f"{name} {path[0]}"


def _draw(column: _Column, x: int, width: int) -> Iterator[str]:
    yield _text(x, 78, column.heading, "heading")
    yield _text(x, 94, column.notes[0], "soft")
    yield _text(x, 109, column.notes[1])
    y = HEADING
    for frame in column.frames:
        yield _rect(x, y, width, frame.height, frame.css, 7)
        yield _text(x + 8, y + 14, frame.title, "unit")
        for index, box in enumerate(frame.boxes):
            top = y + TITLE + index * (BOX + BETWEEN)
            rect = _rect(x + 6, top, width - 12, BOX, box.css, 3)
            yield f"<g><title>{escape(box.hint)}</title>{rect}{_text(x + 12, top + 13, box.label)}</g>"
        y += frame.height + GAP


def _draw_legend(y: int) -> Iterator[str]:
    step = (WIDTH - 2 * MARGIN + GAP) // len(_LEGEND)
    for index, (css, meaning) in enumerate(_LEGEND):
        x = MARGIN + index * step
        yield _rect(x + 1, y - 10, 18, 12, css, 3) + _text(x + 26, y, meaning, "soft")


def _rect(x: int, y: int, width: int, height: int, css: str, radius: int) -> str:
    return f'<rect class="{css}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>'


def _text(x: int, y: int, text: str, css: str = "") -> str:
    named = f' class="{css}"' if css else ""
    return f'<text{named} x="{x}" y="{y}">{escape(text)}</text>'
