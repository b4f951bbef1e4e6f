"""Which rows of a section make which table of docs/hardware.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..sections import Table
from .rows import Row

STEP = ("host_us", "wall_us", "gpu_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A table: one line for each case, one column for each metric.

    Attributes:
        title: of the table.
        case: the names of the case that tell lines apart.
        metrics: the columns.
    """

    title: str
    case: tuple[str, ...]
    metrics: tuple[str, ...]

    def of(self, rows: Sequence[Row]) -> Table | None:
        """The table of some rows; None if there is none for it."""
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            if row.metric in self.metrics and row.error is None and any(name in row.case for name in self.case):
                key = tuple(str(row.case.get(name, "")) for name in self.case)
                lines.setdefault(key, {})[row.metric] = _cell(row)
        if not lines:
            return None
        return Table(
            (*self.case, *self.metrics),
            tuple((*key, *(found.get(metric, "-") for metric in self.metrics)) for key, found in lines.items()),
        )


TABLES: dict[str, tuple[TableSpec, ...]] = {
    "contract": (TableSpec(title="contract tests", case=("outcome",), metrics=("count",)),),
    "correct": (
        TableSpec(
            title="configurations",
            case=("runner", "region", "compiler", "aux", "pool", "static_outputs", "check"),
            metrics=("correct", "stable"),
        ),
    ),
    "hazards": (TableSpec(title="hazards", case=("id", "what"), metrics=("hazard",)),),
    "launch": (
        TableSpec(title="a toy, by layers", case=("layers", "config"), metrics=STEP),
        TableSpec(title="of a piece and its split op", case=("config",), metrics=("host_us_per_piece",)),
        TableSpec(title="one graph with one kernel", case=("replay",), metrics=("host_us",)),
    ),
    "decode": (
        TableSpec(title="decode steps", case=("tokens", "hole", "inputs", "config"), metrics=STEP),
        TableSpec(title="the hole with the real ops", case=("op",), metrics=("syncs", "launches")),
    ),
    "ttft": (
        TableSpec(title="time to the first token", case=("tokens", "runner", "config"), metrics=("wall_us",)),
        TableSpec(title="step state to the device", case=("inputs",), metrics=("host_us",)),
    ),
    "streams": (
        TableSpec(
            title="side streams",
            case=("dims", "compiler", "tokens", "config"),
            metrics=("wall_us", "gpu_us", "of_no_side_stream"),
        ),
    ),
    "memory": (
        TableSpec(
            title="bytes by captured sizes",
            case=("pool", "buckets"),
            metrics=("device_bytes", "reserved_bytes", "pool_bytes", "lasting_bytes"),
        ),
        TableSpec(title="slopes", case=("pool",), metrics=("bytes_per_bucket", "bytes_per_graph")),
        TableSpec(title="what is beside them", case=("what",), metrics=("bytes",)),
    ),
    "capture": (TableSpec(title="capture", case=("layers", "stage"), metrics=("seconds",)),),
    "tools": (TableSpec(title="tools", case=("tool",), metrics=("outcome",)),),
    "ops": (
        TableSpec(title="what was timed", case=("what",), metrics=("outcome",)),
        TableSpec(
            title="kernels",
            case=("op", "variant", "format", "tokens", "context"),
            metrics=("roofline_us", "us", "of_roofline", "of_torch"),
        ),
    ),
}


def _cell(row: Row) -> str:
    if row.ok is not None and isinstance(row.value, str):
        return row.value if row.ok else f"{row.value} (WRONG)"
    if isinstance(row.value, float):
        return f"{row.value:.4g}" if abs(row.value) < 1e5 else f"{row.value:.0f}"
    return str(row.value)
