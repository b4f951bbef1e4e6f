"""The sweep over torch's operators, on ten quick ones; and that it sees what it is there to see."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from repository import ROOT
from torch import Tensor

sys.path.insert(0, str(ROOT))

from benchmarks import opinfo
from benchmarks.alike import differences
from benchmarks.opinfo import Job, Sweep, jobs_of, run, why_known
from benchmarks.opinfo_known import KNOWN, LEFT_OUT
from benchmarks.opinfo_program import Finding, findings, name_of
from dsv4_compile import counters

QUICK = (
    ("addmm", "float32"),
    ("as_strided_copy", "int64"),
    ("as_strided_scatter", "float32"),
    ("conj", "complex64"),
    ("fft.ihfft", "float32"),
    ("logical_not", "bool"),
    ("native_batch_norm", "float32"),
    ("nn.functional.dropout", "float32"),
    ("sort", "int64"),
    ("unsafe_split", "float32"),
)


def job_of(name: str, dtype: str) -> Job:
    return next(iter(jobs_of([name], Sweep(dtypes=(dtype,)))))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "dtype"), QUICK)
def test_a_quick_operator_is_as_in_eager(name: str, dtype: str) -> None:
    job = job_of(name, dtype)
    assert not list(findings(job.op, job.dtype, 1))
    assert counters.graphs_compiled > 0


def test_what_is_excused_has_a_reason_and_exists() -> None:
    names = {name_of(job.op) for job in jobs_of(["*"], Sweep(dtypes=("float32", "int64", "complex64", "bool")))}
    names |= {name_of(op) for op in opinfo.op_db}
    for name, reason in {**LEFT_OUT, **KNOWN}.items():
        assert name in names
        assert reason


def test_the_command_runs_what_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert opinfo.main(["logical_no?", "--dtypes", "bool,int64", "--samples", "1", "--jobs", "2"]) == 0
    assert "2 operators and dtypes in" in capsys.readouterr().out


def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        opinfo.main(["--dtypes", "float33"])
    assert capsys.readouterr().err == "error: torch has no dtype 'float33'\n"


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("action", "patience", "text"),
    [
        # by how long a machine may take that is busy with other things, except for the one that never ends by itself
        (lambda: os._exit(7), 250.0, "the process ended with 7"),
        (spin, 250.0, "took longer than its limit"),
        (lambda: time.sleep(10_000), 1.0, "the process ended with -9"),
    ],
)
def test_a_crash_and_a_hang_are_findings(
    action: Callable[[], None], patience: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(op: Any, dtype: torch.dtype, count: int) -> list[Finding]:
        action()
        return []

    monkeypatch.setattr(opinfo, "findings", act)
    monkeypatch.setattr(opinfo, "_PATIENCE", patience)
    job = Job(SimpleNamespace(name="acting", variant_test_name=""), torch.float32)
    ((_, found),) = run([job], Sweep(seconds=0.2))
    assert [finding.text for finding in found] == [text]
    assert why_known(job, found[0]) is None


def test_a_fault_of_the_compiler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep compares with eager, whoever computes: here every replay is left out."""
    from dsv4_compile.runtime.engines.base import LaunchRecord

    job = job_of("addmm", "float32")
    monkeypatch.setattr(LaunchRecord, "__init__", _without_launches(LaunchRecord.__init__))
    (finding, *_) = findings(job.op, job.dtype, 1)
    assert (finding.call, finding.by_torch) == (1, False)


def _without_launches(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, name, launches, keep_alive: init(self, name, [], keep_alive)


BASE = torch.arange(6.0)
PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "structure": (lambda: (BASE,), lambda: [BASE], "another structure"),
    "number": (lambda: 3, lambda: 3.0, "3.0, eager gives 3"),
    "value": (lambda: BASE + 1, lambda: BASE + 2, "not close"),
    "dtype": (lambda: BASE, lambda: BASE.double(), "torch.float64"),
    "strides": (lambda: torch.ones(2, 3), lambda: torch.ones(3, 2).t(), "strides [1, 2]"),
    "offset": (lambda: torch.ones(3), lambda: torch.ones(4)[1:], "offset 1"),
    "conjugated": (lambda: torch.ones(2) * 1j, lambda: (torch.ones(2) * -1j).conj(), "conjugated"),
    "negated": (lambda: torch.ones(2), lambda: (torch.ones(2) * 1j).conj().imag * -1, ""),
    "object": (lambda: (BASE, BASE), lambda: (BASE, BASE.view(6)), "are one object in eager only"),
    "memory": (lambda: (BASE, BASE + 0), lambda: (BASE, BASE.view(6)), "share memory in compiled code only"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_alike_sees_every_difference(name: str) -> None:
    eager, compiled, text = PAIRS[name]
    found = differences(eager(), compiled())
    assert bool(found) == bool(text)
    assert not found or text in found[0]
    assert not differences(eager(), eager())


def test_alike_lets_roundings_pass_unless_asked() -> None:
    one: Tensor = torch.ones(2)
    assert not differences(one, one + 1e-7)
    assert differences(one, one + 2e-7, exact=True)
    assert not differences(torch.full((2,), torch.nan), torch.full((2,), torch.nan), exact=True)
