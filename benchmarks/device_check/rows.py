"""Rows: what a section measured, one line of JSON each, in a file that several processes append to.

A line is written by one call, so lines of different processes do not mix. Whoever is killed in the middle of one leaves
half a line; the reader counts it and takes the others.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = "float | int | str | bool | None"
LONGEST_TEXT = 6_000  # letters of a value or a traceback; of longer ones the end is kept
LONGEST_FILE = 8 << 20  # bytes that are read of the rows of one section
MOST_ROWS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, or one error.

    Attributes:
        metric: "host_us", "wall_us", "gpu_us", "bytes", "seconds", "count", "fact", ...
        value: the median, if there were several; None for an error.
        case: what was measured, by name.
        spread: the tenth and the ninetieth percentile.
        n: how often it was measured.
        expected: what the value should be, if that is known.
        ok: whether it is; None where there is nothing to judge.
        error: type, message and traceback of what went wrong instead.
    """

    metric: str
    value: Value
    case: Mapping[str, Value] = field(default_factory=dict)
    spread: tuple[float, float] | None = None
    n: int = 1
    expected: Value = None
    ok: bool | None = None
    error: Mapping[str, str] | None = None

    def as_line(self) -> bytes:
        """The row as a line; numbers that JSON does not have become text."""
        written = {
            "case": {name: _plain(value) for name, value in self.case.items()},
            "metric": self.metric,
            "value": _plain(self.value),
            "spread": None if self.spread is None else [_plain(value) for value in self.spread],
            "n": self.n,
            "expected": _plain(self.expected),
            "ok": self.ok,
            "error": None if self.error is None else {name: _plain(text) for name, text in self.error.items()},
        }
        return json.dumps(written, allow_nan=False).encode() + b"\n"

    @property
    def is_bad(self) -> bool:
        """Whether it is an error, or not what was expected."""
        return self.error is not None or self.ok is False


@dataclass(frozen=True, slots=True)
class RowsRead:
    """The rows of a file, and how many lines of it were none."""

    rows: tuple[Row, ...]
    broken: int


def append_row(path: Path, row: Row) -> None:
    """Write a row at the end of a file, with one call."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, row.as_line())
    finally:
        os.close(file)


def read_rows(path: Path) -> RowsRead:
    """The rows of a file, whatever has been written to it; none if there is no file."""
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_FILE)
    except OSError:
        return RowsRead((), 0)
    rows: list[Row] = []
    broken = 0
    for line in text.split(b"\n"):
        if line.strip() and len(rows) < MOST_ROWS:
            row = _parse(line)
            rows += [] if row is None else [row]
            broken += row is None
    return RowsRead(tuple(rows), broken)


def rows_of(written: object) -> Iterator[Row]:
    """The rows of a list that was read from a `result.json`; what is none is left out."""
    for values in written if isinstance(written, list) else ():
        row = _row_of(values)
        if row is not None:
            yield row


def _parse(line: bytes) -> Row | None:
    try:
        return _row_of(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _row_of(values: object) -> Row | None:
    if not isinstance(values, dict) or not isinstance(values.get("metric"), str):
        return None
    case, error, spread = values.get("case"), values.get("error"), values.get("spread")
    pair = spread if isinstance(spread, list) and len(spread) == 2 and all(map(_is_number, spread)) else None
    return Row(
        metric=values["metric"],
        value=_plain(values.get("value")),
        case={str(name): _plain(value) for name, value in case.items()} if isinstance(case, dict) else {},
        spread=None if pair is None else (pair[0], pair[1]),
        n=values["n"] if isinstance(values.get("n"), int) else 1,
        expected=_plain(values.get("expected")),
        ok=values["ok"] if isinstance(values.get("ok"), bool) else None,
        error={str(name): str(text) for name, text in error.items()} if isinstance(error, dict) else None,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: object) -> Value:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else "... " + text[-LONGEST_TEXT:]
