"""What is shown of a result: tables between marks, of runs on a GPU alone, with what went wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.device_check import render
from benchmarks.device_check.catalogue import SECTIONS
from benchmarks.device_check.headline import headline_of
from benchmarks.device_check.result import RunFacts, SectionResult, document, write_result
from benchmarks.device_check.rows import Row, RowsRead
from benchmarks.device_check.tables import TABLES

STEP = {"tokens": 8, "hole": "stand-in", "inputs": "in place"}


def us(value: float, **case: Any) -> Row:
    return Row(metric="wall_us", value=value, spread=(value, value), n=30, case=case)


def made_up_rows() -> dict[str, list[Row]]:
    return {
        "S0": [Row(metric="fact", value="made-up GPU", case={"name": "gpu"})],
        "S2": [
            *(Row(metric="correct", value="as eager", ok=True, case={"runner": "mrv2", "aux": n}) for n in range(13)),
            Row(metric="correct", value="off | by 3", expected="as eager", ok=False, case={"runner": "mrv1", "aux": 0}),
            Row(metric="stable", value=True, ok=True, case={"runner": "mrv2", "aux": 0}),
        ],
        "S4": [Row(metric="host_us_per_piece", value=4.5, case={"config": "captured, inductor"})],
        "S5": [
            us(500.0, config="mrv2 narrow", **STEP),
            us(900.0, config="mrv2 narrow", **{**STEP, "tokens": 64}),
            us(400.0, config="one full graph", **STEP),
            us(1000.0, config="mrv2 narrow, eager pieces", **STEP),
            Row(metric="error", value=None, case={"config": "eager", **STEP}, error={"type": "E", "message": "m"}),
        ],
        "S6": [us(v, config=c, tokens=512, runner="mrv2") for c, v in (("wide", 100.0), ("narrow", 60.0))],
        "S7": [
            Row(
                metric="of_no_side_stream",
                value=0.9,
                case={"dims": "flash", "compiler": "inductor", "tokens": 8, "config": "3 side streams"},
            )
        ],
        "S8": [Row(metric="bytes_per_bucket", value=1e6, case={"pool": "shared"})],
        "S9": [Row(metric="seconds", value=2.5, case={"stage": "second call", "layers": 61})],
    }


@pytest.fixture
def result(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "result.json", only: tuple[str, ...] = (), **changes: Any) -> Path:
        rows = made_up_rows()
        found = [
            SectionResult(
                id=spec.id,
                name=spec.name,
                status="passed" if not only or spec.id in only else "skipped",
                box_s=spec.box,
                read=RowsRead(tuple(rows.get(spec.id, ())) if not only or spec.id in only else (), 0),
            )
            for spec in SECTIONS
        ]
        facts = RunFacts(commit="abc", started="2027-01-01T00:00:00Z", device="cuda", dry=False, deadline_s=540)
        write_result(tmp_path / name, {**document(facts, found, "ended"), **changes})
        return tmp_path / name

    return write


@pytest.fixture
def pages(tmp_path: Path) -> tuple[Path, Path]:
    made = tmp_path / "hardware.md", tmp_path / "README.md"
    for page in made:
        page.write_text(f"before\n\n{render.BEGIN}\n\nold\n\n{render.END}\n\nafter\n", encoding="utf-8")
    return made


def test_the_headline_is_picked_out_of_rows() -> None:
    assert headline_of(made_up_rows()) == {
        "a_correct": "13/14",
        "b_stable": True,
        "c_decode_us": {
            "ours": 500.0,
            "full_graph": 400.0,
            "eager": None,
            "reduce_overhead": None,
            "partitioned": None,
        },
        "d_host_us_per_piece": 4.5,
        "e_ttft": {
            "narrow_of_wide": 0.6,
            "minimal_of_wide": None,
            "narrow_of_eager": None,
            "published_narrow_of_wide": "-53.7 % (range in public reports: -27 to -54 %)",
        },
        "f_bytes_per_bucket": 1e6,
        "f_bytes_per_graph": None,
        "g_streams_ratio": {"1_of_none": None, "2_of_none": None, "3_of_none": 0.9},
        "h_inductor_ratio": 0.5,
        "i_capture_s_61": 2.5,
    }


def test_every_figure_is_there_without_a_row() -> None:
    empty = headline_of({})
    assert set(empty) == set(headline_of(made_up_rows())) == set(render.SHOWN)
    assert (empty["a_correct"], empty["b_stable"], empty["i_capture_s_61"]) == (None, None, None)


def test_tables_are_put_between_the_marks(result: Callable[..., Path], pages: tuple[Path, Path]) -> None:
    assert render.render([result()], *pages) == 0
    hardware, readme = (page.read_text(encoding="utf-8") for page in pages)
    for text in (hardware, readme):
        assert text.startswith(f"before\n\n{render.BEGIN}\n\n")
        assert text.endswith(f"\n\n{render.END}\n\nafter\n")
        assert "old" not in text
    assert "On made-up GPU; [docs/hardware.md]" in readme
    assert "| configurations that give what eager gives " in readme
    for words in ("13/14", "ours 500; full graph 400; eager not measured", "2027-01-01T00:00:00Z", "### S5 decode"):
        assert words in hardware
    # what went wrong is shown too, and breaks no table
    assert "mrv1 0: correct off / by 3, expected as eager" in hardware
    assert "| S10 tools" in hardware
    assert "### S10" not in hardware


def test_the_later_of_two_runs_counts_where_it_ran(result: Callable[..., Path], pages: tuple[Path, Path]) -> None:
    first, second = result("one.json"), result("two.json", only=("S0", "S9"))
    text = json.loads(second.read_text())
    text["sections"][9]["rows"][0]["value"] = 7.25
    second.write_text(json.dumps(text))
    assert render.render([first, second], *pages) == 0
    hardware = pages[0].read_text(encoding="utf-8")
    assert "7.25" in hardware
    assert "13/14" in hardware
    assert "run 2" in hardware


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"dry": True}, "is of a dry run on a CPU"),
        ({"device": "cpu"}, "is of a dry run on a CPU"),
        ({"dry": None}, "is of a dry run on a CPU"),
        ({"schema": 2}, "is no result.json of schema 1"),
        ({"sections": "none"}, "is no result.json of schema 1"),
        ({"sections": []}, "names no GPU"),
        ({"sections": [3, {"id": "S0", "rows": [4, {"metric": "fact", "case": []}]}]}, "names no GPU"),
    ],
)
def test_what_is_not_shown_as_if_of_a_gpu(
    changes: dict[str, Any],
    complaint: str,
    result: Callable[..., Path],
    pages: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert render.render([result(**changes)], *pages) == 2
    assert complaint in capsys.readouterr().err
    assert all("old" in page.read_text(encoding="utf-8") for page in pages)


def test_no_page_is_written_if_one_has_no_marks(
    result: Callable[..., Path], pages: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pages[1].write_text("by hand", encoding="utf-8")
    assert render.render([result()], *pages) == 2
    assert "README.md needs one line" in capsys.readouterr().err
    assert "old" in pages[0].read_text(encoding="utf-8")


def test_the_pages_of_this_repository_say_what_is_known() -> None:
    """Nothing, until a result is kept beside them; then what it says."""
    kept = sorted((ROOT / "docs" / "hardware").glob("*.json"))
    runs = [render.load(path) for path in kept]
    for page, text in (
        (render.HARDWARE, render.hardware_text(runs) if runs else render.NOTHING),
        (render.README, render.readme_text(runs) if runs else render.NOTHING),
    ):
        assert render.between_marks(page, text) == page.read_text(encoding="utf-8"), page


def test_every_section_that_measures_has_a_table() -> None:
    assert set(TABLES) == {spec.name for spec in SECTIONS} - {"facts"}
