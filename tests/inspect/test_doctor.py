"""`python -m dsv4_compile doctor`: what it says, and that it notices what is wrong."""

from __future__ import annotations

import json
import re
from importlib import metadata

import pytest
import torch
from repository import ROOT

from dsv4_compile.inspect import doctor
from dsv4_compile.inspect.cli import main


def test_the_backend_can_be_used_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    answer = capsys.readouterr().out
    assert answer.endswith("\nthe backend can be used\n")
    assert f"torch         {torch.__version__}\n" in answer
    assert "entry point   found: torch.compile(model, backend='dsv4_piecewise')" in answer
    assert "pieces        eager on cpu" in answer
    assert "side streams  0 on cpu" in answer


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["usable"], answer["problem"]) == (True, None)
    assert answer["facts"]["dsv4_compile"] == metadata.version("dsv4-compile")
    assert answer["facts"]["runner"].startswith("mrv1 (auto: ROCm" if torch.version.hip else "mrv2 (auto: not ROCm")


def test_a_missing_cxx_compiler_is_no_problem_until_inductor_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert doctor.describe_cxx().startswith("no no-such-compiler: piece_compiler='inductor' needs one")
    assert doctor.diagnose().problem is None


@pytest.mark.parametrize(
    ("cuda", "hip", "device"),
    [
        (None, None, r"CPU, \d+ threads; no CUDA device"),
        ("13.0", None, r"CPU, .*; no CUDA device: torch is built for CUDA 13.0, and finds no driver or no GPU .*"),
        (None, "6.4", r"CPU, .*; no CUDA device: torch is built for ROCm 6.4, and finds no driver or no GPU .*"),
    ],
)
def test_what_torch_is_built_for(
    cuda: str | None, hip: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    facts = dict(doctor.diagnose().facts)
    assert re.fullmatch(device, facts["device"])
    assert ("C compiler" in facts) == (cuda is not None or hip is not None)


@pytest.mark.parametrize(
    ("there", "cc", "found"),
    [
        (("gcc", "clang"), None, "gcc, for Triton"),
        (("clang",), None, "clang, for Triton"),
        ((), None, "neither gcc nor clang: piece_compiler='inductor' needs a C compiler for Triton; "),
        (("gcc", "icx"), "icx", "icx, for Triton"),
        (("gcc",), "icx", "no icx: piece_compiler='inductor' needs a C compiler for Triton; "),
    ],
)
def test_which_c_compiler_triton_would_take(
    there: tuple[str, ...], cc: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    monkeypatch.delenv("CC", raising=False)
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    assert doctor.describe_cc().startswith(found)


def test_without_triton_no_c_compiler_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor.describe_cc().startswith("not asked for: no triton")


def test_no_entry_point_is_a_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    assert main(["doctor"]) == 1
    assert "the backend cannot be used: no entry point 'dsv4_piecewise': install" in capsys.readouterr().out


def test_an_entry_point_of_another_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    other = metadata.EntryPoint("dsv4_piecewise", "other:backend", "torch_dynamo_backends")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [other])
    assert doctor.missing_entry_point() == "another package has an entry point 'dsv4_piecewise': other:backend"


def test_a_trial_that_fails_is_a_problem_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no room\nand more")

    monkeypatch.setattr(doctor, "_trial", broken)
    assert main(["doctor", "--json"]) == 1
    problem = json.loads(capsys.readouterr().out)["problem"]
    assert problem.startswith("a trial on cpu failed: ")
    assert "\n" not in problem


def test_wrong_numbers_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert doctor.failed_trial("cpu") == "a trial on cpu gave wrong numbers in call 1"


def test_a_trial_that_is_never_captured_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4_compile.runtime.program.limits.Limits.excludes", lambda *_: True)
    problem = doctor.failed_trial("cpu")
    assert problem is not None
    assert problem.startswith("a trial on cpu was not captured and replayed: expected the counts to change by ")
    assert problem.endswith("they changed by {'uncaptured_calls': 3, 'captures': 0, 'replays': 0}")


@pytest.mark.parametrize(("version", "usable"), [("2.10.1", False), ("2.11.0a0+git", True), ("3.0", True)])
def test_age_of_torch(version: str, usable: bool) -> None:
    assert (doctor.old_torch(version) is None) == usable
    assert usable or doctor.old_torch(version) == "torch 2.10.1 is older than 2.11: install torch 2.11 or newer"


def test_what_has_not_run_is_what_the_docs_say() -> None:
    hardware = (ROOT / "docs" / "hardware.md").read_text()
    assert (
        "| `cuda` engine (`dsv4_compile/runtime/engines/cuda/engine.py`) | does not apply | **not run yet** |"
        in hardware
    )
    assert doctor.diagnose().not_run == (doctor.NOT_RUN,)
