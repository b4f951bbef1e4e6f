"""The one form that every benchmark has: it takes a `Setting` and gives a `Section`, tables of text between sentences.

    | row  | ms a step | of eager |
    |------|----------:|---------:|
    | wide |      12.1 |     0.97 |

The same text is printed and written to docs/benchmarks.md.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

WIDTH = 118


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How to run a benchmark.

    Attributes:
        quick: shrunk sizes, to see that it runs; its figures mean nothing.
        device: where the measured models live; compile times are taken on the CPU.
        vllm_python: a Python that has vLLM, for the comparison in `dispatch`; None leaves it out.
    """

    quick: bool = False
    device: str = "cpu"
    vllm_python: Path | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text under column names; a column of figures is set to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = (self.columns, *self.rows)
        widths = [max(3, *(len(line[place]) for line in lines)) for place in range(len(self.columns))]
        to_right = [all(_is_figure(row[place]) for row in self.rows) for place in range(len(self.columns))]
        rule = (f"{'-' * (width - 1)}{':' if right else '-'}" for width, right in zip(widths, to_right, strict=True))
        set_rows = (
            (cell.rjust(width) if right else cell.ljust(width))
            for cells in lines
            for cell, width, right in zip(cells, widths, to_right, strict=True)
        )
        texts = [f"| {' | '.join(next(set_rows) for _ in self.columns)} |" for _ in lines]
        return "\n".join([texts[0], f"| {' | '.join(rule)} |", *texts[1:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a benchmark found.

    Attributes:
        title: of the section.
        parts: sentences and tables in order; line breaks within sentences do not count.
    """

    title: str
    parts: tuple[str | Table, ...]

    def __str__(self) -> str:
        return "\n\n".join((f"## {self.title}", *(_as_text(part) for part in self.parts)))


def _as_text(part: str | Table) -> str:
    return str(part) if isinstance(part, Table) else textwrap.fill(" ".join(part.split()), WIDTH)


def _is_figure(cell: str) -> bool:
    return cell in ("-", "all") or cell[:1].isdigit()
