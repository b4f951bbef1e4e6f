"""`result.json`: what a run found. It is written whole, beside itself, and put in place in one step.

    {"schema": 1, "commit", "started", "device", "dry", "deadline_s", "state": "running" | "ended" | "interrupted",
     "machine": {"gpu", "driver", ...},
     "sections": [{"id", "name", "status", "box_s", "wall_s", "rc", "signal", "error", "broken_lines", "left_behind",
                   "rows": [...]}],
     "headline": {"a_correct", ...}}

The status of a section: `passed`; `partial`, it ended and some rows are errors or not as expected; `failed`, it ended
with an error; `timeout`, it was killed at the end of its time; `interrupted`; `skipped`, with the reason as its error;
`running`, if the run itself was killed meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from .catalogue import SectionSpec
from .headline import headline_of
from .rows import Row, RowsRead, rows_of

SCHEMA = 1
NO_ROWS = RowsRead((), 0)
Status: TypeAlias = Literal["passed", "partial", "failed", "timeout", "interrupted", "skipped", "running"]
Json: TypeAlias = "dict[str, object]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionResult:
    """What a section left; see the module's docstring.

    Attributes:
        read: its rows.
        error: type, message and tail of the output, if there is something to say.
    """

    id: str
    name: str
    status: Status
    box_s: float
    wall_s: float = 0.0
    rc: int | None = None
    signal: str | None = None
    read: RowsRead = NO_ROWS
    error: Mapping[str, str] | None = None
    left_behind: int = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        """Its rows."""
        return self.read.rows

    def to_json(self) -> Json:
        """As it is written."""
        return {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "box_s": round(self.box_s, 1),
            "wall_s": round(self.wall_s, 1),
            "rc": self.rc,
            "signal": self.signal,
            "error": self.error,
            "broken_lines": self.read.broken,
            "left_behind": self.left_behind,
            "rows": [json.loads(row.as_line()) for row in self.rows],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run before its first section."""

    commit: str
    started: str
    device: str
    dry: bool
    deadline_s: float

    def to_json(self) -> Json:
        """As it is written."""
        return {
            "commit": self.commit,
            "started": self.started,
            "device": self.device,
            "dry": self.dry,
            "deadline_s": self.deadline_s,
        }


def document(facts: RunFacts, sections: Sequence[SectionResult], state: str) -> Json:
    """A run as it is written."""
    rows = {section.id: section.rows for section in sections}
    return {
        "schema": SCHEMA,
        **facts.to_json(),
        "state": state,
        "machine": machine_of(rows.get("S0", ())),
        "sections": [section.to_json() for section in sections],
        "headline": headline_of(rows),
    }


def machine_of(rows: Sequence[Row]) -> Json:
    """The facts of the first section by name."""
    return {str(row.case.get("name")): row.value for row in rows if row.metric == "fact"}


def skipped(spec: SectionSpec, reason: str) -> SectionResult:
    """A section that was not started."""
    return SectionResult(
        id=spec.id, name=spec.name, status="skipped", box_s=spec.box, error={"type": "skipped", "message": reason}
    )


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, at any time, finds the old text or the new one."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_result(path: Path, written: Json) -> None:
    """Write a document."""
    write_whole(path, json.dumps(written, indent=1, allow_nan=False) + "\n")


def read_result(path: Path) -> Json | str:
    """A document that was written, or why the file is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found.get("sections"), list):
        return f"{path} is no result.json of schema {SCHEMA}"
    return found


def sections_read(written: Json) -> dict[str, tuple[str, tuple[Row, ...]]]:
    """Status and rows of each section of a document, by its id."""
    sections = written["sections"]
    assert isinstance(sections, list), "read_result has looked"
    return {
        str(section.get("id")): (str(section.get("status")), tuple(rows_of(section.get("rows"))))
        for section in sections
        if isinstance(section, dict)
    }
