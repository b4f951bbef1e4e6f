"""What is printed: one line a section, and the headline at the end; the rest is in the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .result import Json, SectionResult

MOST = 8_000  # letters in all, so that whoever keeps the end of the output only still has everything


def section_line(result: SectionResult) -> str:
    """How a section ended, in one line."""
    bad = sum(row.is_bad for row in result.rows)
    parts = [f"{len(result.rows)} rows" + (f", {bad} of them bad" if bad else ""), f"{result.wall_s:.0f} s"]
    if result.status == "skipped":
        parts = []
    if result.error is not None:
        parts.append(result.error["message"])
    if result.read.broken:
        parts.append(f"{result.read.broken} broken lines")
    if result.left_behind:
        parts.append(f"left {result.left_behind} processes behind, which were killed")
    return f"{result.id} {result.name}: {', '.join([result.status, *parts])}"[:300]


def closing_text(written: Json, out: Path) -> str:
    """The headline, and where the rest is."""
    kind = "" if written["device"] == "cuda" else " (a dry run on a CPU: the figures mean nothing)"
    headline = written["headline"]
    assert isinstance(headline, Mapping)
    lines = [f"headline{kind}", *(f"  {name}: {_text(value)}" for name, value in headline.items())]
    return "\n".join([*lines, f"written to {out / 'result.json'}"])[:MOST]


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    return "not measured" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
