"""Writes what a run on a GPU found into docs/hardware.md and README.md, between marks; by hand nobody does.

Only runs on a GPU are taken. What a section did not measure is left out of its table, and sections that did not pass
are named with what went wrong: a page that shows the good rows alone would be a lie.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..sections import Table
from .catalogue import SECTIONS
from .headline import headline_of
from .parent import ROOT
from .result import Json, machine_of, read_result, sections_read
from .rows import Row
from .tables import TABLES

BEGIN = "<!-- begin: written by python -m benchmarks.device_check, not by hand -->"
END = "<!-- end: device_check -->"
HARDWARE, README = ROOT / "docs" / "hardware.md", ROOT / "README.md"
NOTHING = "Nothing of this has run on a GPU yet."
MACHINE = ("gpu", "driver", "cuda", "torch", "triton", "python", "cores")
SHOWN: dict[str, str] = {
    "a_correct": "configurations that give what eager gives",
    "b_stable": "right while memory around the graphs changes hands",
    "c_decode_us": "a decode step of 8 layers and 8 tokens, us",
    "d_host_us_per_piece": "time of the host for a piece and its split op, us",
    "e_ttft": "time to the first token of a prompt of 512 tokens, as a ratio",
    "f_bytes_per_bucket": "bytes of one more captured size",
    "f_bytes_per_graph": "bytes of one more graph",
    "g_streams_ratio": "a decode step of 2 C4A layers and 8 tokens by side streams, as a ratio",
    "h_inductor_ratio": "a decode step with pieces compiled by Inductor, of eager pieces",
    "i_capture_s_61": "seconds to capture 61 layers",
}


class NotShownError(Exception):
    """Why a result is not shown on the pages."""


def render(files: Sequence[Path], hardware: Path = HARDWARE, readme: Path = README) -> int:
    """Write both pages; the exit code is 0 if they were."""
    try:
        runs = [load(path) for path in files]
        pages = [(hardware, hardware_text(runs)), (readme, readme_text(runs))]
        written = [(page, between_marks(page, text)) for page, text in pages]
    except NotShownError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for page, text in written:
        page.write_text(text, encoding="utf-8")
        print(f"written: {page}")
    return 0


def load(path: Path) -> Json:
    """A result that may be shown.

    Raises:
        NotShownError: it is no result, or not one of a GPU.
    """
    found = read_result(path)
    if isinstance(found, str):
        raise NotShownError(found)
    if found.get("dry") is not False or found.get("device") != "cuda":
        raise NotShownError(
            f"{path} is of a dry run on a CPU, whose figures mean nothing: it is not shown as if of a GPU"
        )
    if not machine_of(sections_read(found).get("S0", ("", ()))[1]).get("gpu"):
        raise NotShownError(f"{path} names no GPU: its section S0 has found none, or did not run")
    return found


def hardware_text(runs: Sequence[Json]) -> str:
    """The tables of all sections; of two runs the later one's sections count, if they ran."""
    merged = merge(runs)
    rows = {name: found for name, (_, found) in merged.items()}
    parts = [str(_machine_table(runs)), str(headline_table(rows)), str(_status_table(merged))]
    for spec in SECTIONS:
        for table in TABLES.get(spec.name, ()):
            filled = table.of(rows.get(spec.id, ()))
            parts += [] if filled is None else [f"### {spec.id} {table.title}", str(filled)]
    return "\n\n".join(parts)


def readme_text(runs: Sequence[Json]) -> str:
    """The headline, and where the rest is."""
    rows = {name: found for name, (_, found) in merge(runs).items()}
    gpu = machine_of(rows.get("S0", ())).get("gpu")
    return f"On {gpu}; [docs/hardware.md](docs/hardware.md) has the rest.\n\n{headline_table(rows)}"


def headline_table(rows: Mapping[str, Sequence[Row]]) -> Table:
    """Figures a to i."""
    headline = headline_of(rows)
    return Table(("", "measured"), tuple((text, _shown(headline[name])) for name, text in SHOWN.items()))


def merge(runs: Sequence[Json]) -> dict[str, tuple[str, tuple[Row, ...]]]:
    """Status and rows of each section."""
    merged: dict[str, tuple[str, tuple[Row, ...]]] = {}
    for run in runs:
        for name, (status, rows) in sections_read(run).items():
            if name not in merged or status != "skipped":
                merged[name] = (status, rows)
    return merged


def between_marks(page: Path, text: str) -> str:
    """A page with a text between its two marks.

    Raises:
        NotShownError: it has not one pair of them.
    """
    old = page.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise NotShownError(f"{page.name} needs one line {BEGIN!r} and, after it, one line {END!r}")
    before, _, rest = old.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}"


def _machine_table(runs: Sequence[Json]) -> Table:
    columns = [_facts_of(run) for run in runs]
    names = list(columns[0])
    heads = ("", *(f"run {number}" for number in range(1, len(runs) + 1)))
    return Table(heads, tuple((name, *(column.get(name, "-") for column in columns)) for name in names))


def _facts_of(run: Json) -> dict[str, str]:
    machine = machine_of(sections_read(run)["S0"][1])
    return {
        "date": str(run.get("started")),
        "commit": str(run.get("commit")),
        **{name: str(machine.get(name, "unknown")) for name in MACHINE},
    }


def _status_table(merged: Mapping[str, tuple[str, Sequence[Row]]]) -> Table:
    lines = []
    for spec in SECTIONS:
        status, rows = merged.get(spec.id, ("skipped", ()))
        wrong = next((row for row in rows if row.is_bad), None)
        lines.append((f"{spec.id} {spec.name}", status, str(len(rows)), "" if wrong is None else _wrong(wrong)))
    return Table(("section", "status", "rows", "first of what went wrong"), tuple(lines))


def _wrong(row: Row) -> str:
    case = " ".join(str(value) for value in row.case.values())
    said = row.error["message"] if row.error is not None else f"{row.metric} {row.value}, expected {row.expected}"
    return " ".join(f"{case}: {said}".split()).replace("|", "/")[:100]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name.replace('_', ' ')} {_shown(inner)}" for name, inner in value.items())
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)
