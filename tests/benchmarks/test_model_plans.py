"""The page about planning shows the tables of the code, and what is computed in them is so at full size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from repository import ROOT

from benchmarks import model_plans
from benchmarks.__main__ import END
from benchmarks.model_plans import BEGIN, main, question_for
from dsv4_compile.plan_model.command import RELEASED
from dsv4_compile.plan_model.make import plan_model
from dsv4_compile.plan_model.tables import CACHES, MEMORY, ROOM, STEP, TextTable, tables_of

PAGE = ROOT / "docs" / "planning.md"
# estimates: those of the machine that wrote the page
MEASURED = {"capture (s, estimate)", "pool (estimate)", "graphs (estimate)", "tokens of context"}


def written(model: str) -> list[list[tuple[str, ...]]]:
    """The tables of a model on the page: names of columns, then rows."""
    block = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    (section,) = [part for part in re.split(r"^### ", block, flags=re.MULTILINE) if part.startswith(model.capitalize())]
    tables = re.findall(r"(?:^\|.*\n)+", f"{section}\n", re.MULTILINE)
    return [[cells(line) for line in table.splitlines() if not line.startswith("| -")] for table in tables]


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


@pytest.mark.parametrize("model", RELEASED)
def test_the_page_has_the_columns_of_the_code(model: str) -> None:
    tables = written(model)
    assert [table[0] for table in tables] == [STEP, MEMORY, ROOM, CACHES]
    tokens = [str(count) for count in question_for(model).tokens]
    assert [[row[0] for row in table[1:]] for table in tables[:2]] == [tokens, tokens]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "launches", "parameters"),
    # a split op for each layer and one more for each C4A layer; a piece before each region and one at the end
    [("flash", (43 + 21, 43 + 1, 38), 6_145_559_872), ("pro", (61 + 30, 61 + 1, 58), 21_318_905_728)],
)
def test_a_released_model_is_planned_at_full_size_as_the_page_says(
    model: str, launches: tuple[int, int, int], parameters: int
) -> None:
    plan = plan_model(question_for(model))
    assert (plan.launches.by_hand, plan.launches.graphs, plan.launches.duplicates) == launches
    assert plan.parameters == parameters
    assert all(bucket.lower_bound <= bucket.workspace < bucket.unshared for bucket in plan.buckets)
    for made, shown in zip(tables_of(plan), written(model), strict=True):
        assert computed(made.columns, made.rows) == computed(shown[0], shown[1:])


def computed(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The cells that depend on no engine."""
    kept = [place for place, column in enumerate(columns) if column not in MEASURED]
    return [[row[place] for place in kept] for row in rows if row[0] not in ("captured", "left for caches")]


def test_a_table_sets_figures_to_the_right() -> None:
    table = TextTable("", "", ("name", "bytes"), (("a", "12345.5"), ("longer", "1")))
    assert str(table) == "\n".join(
        ["| name   |   bytes |", "| ------ | ------: |", "| a      | 12345.5 |", "| longer |       1 |"]
    )


def test_a_page_without_marks_is_refused_before_anything_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_plans, "plan_model", lambda question: pytest.fail("planned"))
    page = tmp_path / "page.md"
    page.write_text(BEGIN)
    for path in (page, tmp_path / "none.md"):
        with pytest.raises(SystemExit) as stopped:
            main(["--write", str(path)])
        assert stopped.value.code == 2
        assert "is no page with the lines" in capsys.readouterr().err
