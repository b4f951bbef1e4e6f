"""What sections rest on: which options meet, what the stand-in for the hole is, when a time is refused."""

from __future__ import annotations

import itertools
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.attention_stack import stack_of
from benchmarks.device_check.bench import Bench
from benchmarks.device_check.headline import CONFIGURATIONS
from benchmarks.device_check.hole import light_ops
from benchmarks.device_check.rows import Row, read_rows
from benchmarks.device_check.sections import contract, correct, decode, ops
from benchmarks.device_check.timing import build, measure
from benchmarks.kernel_cases import OPS


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(device="cpu", dry=True, rows=tmp_path / "rows", out=tmp_path, ends=float("inf"))


def rows(bench: Bench) -> tuple[Row, ...]:
    return read_rows(bench.rows).rows


def test_any_two_values_of_two_options_meet_in_a_configuration() -> None:
    taken = [{field.name: getattr(c, field.name) for field in fields(c)} for c in correct.CONFIGURATIONS]
    for row in taken:  # a region is one of a runner
        row["policy"] = f"{row.pop('runner')} {row.pop('region')}"
    assert len(taken) == len({tuple(row.values()) for row in taken}) == CONFIGURATIONS
    missing = [
        {first: a, second: b}
        for first, second in itertools.combinations(taken[0], 2)
        for a, b in itertools.product(*({row[name] for row in taken} for name in (first, second)))
        if not any((row[first], row[second]) == (a, b) for row in taken)
    ]
    assert sorted(missing, key=str) == [
        {"check": "full", "policy": "mrv1 wide"},
        {"compiler": "aot_eager", "policy": "mrv1 wide"},
    ]


@torch.no_grad()
def test_the_stand_in_waits_for_nothing_and_leaves_the_ops_as_they_were(bench: Bench) -> None:
    stack, inputs = stack_of((4, 128), 8)
    real = stack(*inputs)
    with light_ops("cpu"):
        light = stack(*inputs)
        with decode._LaunchCount() as seen:
            stack(*inputs)
    assert sum(seen.syncs.values()) == 0
    assert 0 < sum(seen.launches.values()) < 30
    assert not torch.equal(light, real)
    assert torch.equal(stack(*inputs), real)
    with decode._LaunchCount() as seen:
        stack(*inputs)
    assert (seen.syncs["forward_mqa"], seen.syncs["sparse_indexer"]) == (1, 1)  # of C128A; of C4A


def test_a_step_that_gives_other_numbers_has_no_time(bench: Bench) -> None:
    made = {"eager": lambda: lambda: torch.ones(2), "other": lambda: lambda: torch.full((2,), 1.5)}
    assert list(build(bench, made, 0.1, tokens=1)) == ["eager"]
    found = [(row.metric, row.case["config"], row.ok) for row in rows(bench)]
    assert found == [("max_abs_err", "eager", True), ("max_abs_err", "other", False), ("error", "other", None)]


def test_a_step_that_still_compiles_has_no_time(bench: Bench) -> None:
    def step() -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda x: x + 1, backend="dsv4_piecewise")(torch.ones(2))

    measure(bench, {"fresh": step, "settled": lambda: None}, 1.0)
    assert {(row.metric, row.case["config"]) for row in rows(bench)} == {
        ("error", "fresh"),
        ("host_us", "settled"),
        ("wall_us", "settled"),
    }
    assert "'graphs_compiled': " in next(row.error["message"] for row in rows(bench) if row.error)


REPORT = """<testsuites><testsuite>
<testcase name="one"/><testcase name="two"><failure message="assert 1 == 2">long</failure></testcase>
<testcase name="three"><skipped message="no triton"/></testcase><testcase name="four"><error message="boom"/></testcase>
</testsuite></testsuites>"""


def test_a_report_of_pytest_becomes_rows(bench: Bench, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    contract.read_report(bench, report)
    found = [(row.metric, row.value, row.ok) for row in rows(bench)]
    assert found == [
        ("outcome", "failure: assert 1 == 2", False),
        ("outcome", "skipped: no triton", None),
        ("outcome", "error: boom", False),
        ("count", 1, None),
        ("count", 1, None),
        ("count", 1, None),
        ("count", 1, None),
    ]
    contract.read_report(bench, tmp_path / "none.xml")
    assert rows(bench)[-1].value == "no report: see the log"


def test_without_a_gpu_kernels_have_rooflines_and_no_times(bench: Bench) -> None:
    ops.run(bench)
    said, *found = rows(bench)
    assert said.value == "nothing was timed: there is no GPU"
    assert {row.metric for row in found} == {"roofline_us"}
    assert {row.case["op"] for row in found} == set(OPS)
    assert {row.case["format"] for row in found} == {"auto", "fp8_ds_mla", "fp8", "mxfp4"}
    by_format = {
        row.case["format"]: row.value
        for row in found
        if (row.case["op"], row.case["tokens"], row.case["context"]) == ("sparse_indexer", 1, 32768)
    }
    assert by_format["auto"] > by_format["fp8"] > by_format["mxfp4"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(("times", "judged"), [(1.5, True), (2.5, None), (9.0, False)])
def test_kernels_are_held_to_the_aims(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, times: float, judged: bool | None
) -> None:
    """At most 2 times the roofline in bf16, 3 times in packed formats; of the other kernels nothing is asked."""
    monkeypatch.setattr(ops, "KERNELS_SERVE", True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        ops, "time_case", lambda case, seconds: {"kernel": times * ops.work_of(case).seconds, "torch": 1.0}
    )
    monkeypatch.setattr(Bench, "_ask_device", lambda self, case: None)
    ops.run(replace(bench, device="cuda"))
    found = {metric: [row for row in rows(bench) if row.metric == metric] for metric in ("of_roofline", "us", "error")}
    assert found["error"] == []
    assert len(found["us"]) == len(found["of_roofline"]) == len(list(ops.chosen_cases()))
    for row in found["of_roofline"]:
        assert row.value == pytest.approx(times)
        if row.case["op"] not in ("forward_mqa", "sparse_indexer"):
            assert row.ok is None
        elif judged is None:
            assert row.ok is (row.case["format"] != "auto")
        else:
            assert row.ok is judged


def test_where_time_is_short_the_cases_that_are_left_are_counted(bench: Bench) -> None:
    ops.run(replace(bench, ends=0.0))
    assert [row.metric for row in rows(bench)] == ["outcome", "outcome"]
    count = len(list(ops.chosen_cases()))
    assert rows(bench)[-1].value == f"no time for {count} of {count} cases"


@pytest.mark.exhaustive
def test_the_contract_runs_without_pytest(bench: Bench) -> None:
    contract.run_examples(bench)
    assert [row.error for row in rows(bench) if row.error] == []
    assert rows(bench)[-1].value > 30  # type: ignore[operator]
