"""What sections do to a run: result.json is whole, has all others, and nobody of a section is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, SUPPORT

sys.path.insert(0, str(ROOT))

from benchmarks.device_check import parent
from benchmarks.device_check.arguments import Options
from benchmarks.device_check.catalogue import SectionSpec
from benchmarks.device_check.headline import headline_of


def section(name: str, number: int = 0, box: float = 60.0) -> SectionSpec:
    entry = f"misbehaving_sections:{name}"
    return SectionSpec(id=f"T{number}", name=name, entry=entry, box=box, least=0.1, about="a test")


def sections(*names: str) -> tuple[SectionSpec, ...]:
    return tuple(section(name, number) for number, name in enumerate(names))


def options(chosen: Sequence[SectionSpec], out: Path, deadline: float = 300.0) -> Options:
    return Options(
        sections=tuple(chosen),
        left_out=(),
        deadline=deadline,
        device="cpu",
        dry=True,
        out=out,
        render=(),
        shows_boxes=False,
    )


@pytest.fixture(autouse=True)
def _support_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs sections, and reads what is in result.json afterwards."""

    def run_them(chosen: Sequence[SectionSpec], deadline: float = 300.0) -> tuple[int, dict[str, Any]]:
        code = parent.run(options(chosen, tmp_path, deadline))
        return code, strictly_read(tmp_path / "result.json")

    return run_them


def strictly_read(path: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    return found


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_every_kind_of_end_leaves_a_result_with_all_others(
    run: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    ends = {
        "measures": ("passed", 0, None),
        "raises": ("failed", 1, None),
        "exits": ("failed", 5, None),
        "is_killed": ("failed", None, "SIGKILL"),
        "reads_nowhere": ("failed", None, "SIGSEGV"),
        "writes_half_a_line": ("failed", None, "SIGKILL"),
        "writes_rubbish": ("partial", 0, None),
        "floods": ("failed", 1, None),
        "has_an_error_row": ("partial", 0, None),
        "is_not_as_expected": ("partial", 0, None),
        "measures_nothing": ("partial", 0, None),
        "not_there": ("failed", 1, None),
    }
    code, result = run([*sections(*ends), section("hangs", len(ends), box=3.0)])
    found = {s["name"]: s for s in result["sections"]}
    assert code == 1
    assert {name: (s["status"], s["rc"], s["signal"]) for name, s in found.items()} == {
        **ends,
        "hangs": ("timeout", None, "SIGKILL"),
    }
    assert result["state"] == "ended"
    # rows that were there before the end, in each
    without = {"measures_nothing", "not_there", "is_not_as_expected"}
    for name in set(found) - without:
        assert found[name]["rows"][0]["value"] == 1.5, name
    assert found["raises"]["rows"][1]["error"]["message"].startswith("CUDA error")
    assert "in raises" in found["raises"]["rows"][1]["error"]["traceback"]
    assert found["not_there"]["rows"][0]["error"]["type"] == "AttributeError"
    assert (found["writes_half_a_line"]["broken_lines"], len(found["writes_half_a_line"]["rows"])) == (1, 1)
    assert (found["writes_rubbish"]["broken_lines"], len(found["writes_rubbish"]["rows"])) == (4, 2)
    assert found["floods"]["error"]["tail"].endswith("the end of it\n")
    assert len(found["floods"]["error"]["tail"]) <= 16_000
    assert found["has_an_error_row"]["rows"][2]["value"] == "nan"
    assert "Fatal Python error: Segmentation fault" in found["reads_nowhere"]["error"]["tail"]
    assert found["hangs"]["error"]["message"] == "killed at the end of its time box after 3 s"
    assert set(result["headline"]) == set(headline_of({}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "result.json"]
    assert "ValueError: on purpose" in (tmp_path / "log.txt").read_text()


def test_nobody_of_a_section_is_left(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, result = run(sections("leaves_somebody_behind"))
    (section,) = result["sections"]
    assert (code, section["status"], section["left_behind"]) == (1, "partial", 1)
    assert [pid for pid in map(int, section["rows"][0]["value"].split()) if is_alive(pid)] == []


@pytest.mark.exhaustive
def test_parts_in_processes_of_their_own(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    _, result = run(sections("runs_parts"))
    rows = result["sections"][0]["rows"]
    ended = {row["case"]["part"]: row["value"] for row in rows if row["metric"] == "ended_well"}
    assert ended == {"measures": True, "is_killed": False, "exits": False, "hangs": False, "tool": False}
    assert sum(row["value"] == 1.5 for row in rows) >= 3  # of three parts, and of one if it had the time
    said = {row["case"]["part"]: row["error"]["message"] for row in rows if row["error"]}
    assert said["is_killed"] == "misbehaving_sections:is_killed: ended by SIGKILL"
    assert said["exits"].endswith("ended with exit code 5")
    assert said["hangs"].endswith("killed after 2 s")
    assert "no such tool" in said["tool"]


def test_the_deadline_comes_in_the_middle_of_a_section(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    first, second = sections("hangs", "measures")
    code, result = run([first, second], deadline=parent.RESERVE + 4)
    cut, left_out = result["sections"]
    assert (code, cut["status"], len(cut["rows"])) == (1, "timeout", 1)
    assert cut["error"]["message"].startswith("killed at the end of its deadline after ")
    assert left_out["status"] == "skipped"
    assert "s are left before the deadline, and it needs" in left_out["error"]["message"]


def test_without_a_gpu_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    chosen = options(sections("measures", "measures"), tmp_path)
    assert parent.run(replace(chosen, device="cuda", dry=False)) == 1
    first, second = strictly_read(tmp_path / "result.json")["sections"]
    assert (first["status"], first["error"]["message"]) == ("failed", "no GPU: torch finds no CUDA device")
    assert (second["status"], second["error"]["message"]) == ("skipped", "no GPU")


@pytest.mark.exhaustive
def test_an_older_result_is_kept(run: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path) -> None:
    for _ in range(3):
        assert run(sections("measures"))[0] == 0
    assert {"result.json", "result.1.json", "result.2.json"} < {path.name for path in tmp_path.iterdir()}


RUN_AND_WAIT = """
import sys
from pathlib import Path
from benchmarks.device_check import parent
from test_parent import options, sections
parent.WRITE_EVERY = 0.1
sys.exit(parent.run(options(sections("measures", "hangs", "measures"), Path(sys.argv[1]))))
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_whoever_ends_the_parent_leaves_what_was_measured(number: signal.Signals, tmp_path: Path) -> None:
    """A signal that nobody can handle leaves what was written last, and no process either."""
    path = os.pathsep.join([str(ROOT), str(SUPPORT), str(Path(__file__).parent)])
    command = [sys.executable, "-c", RUN_AND_WAIT, str(tmp_path)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL)
    result = wait_for(tmp_path / "result.json", "hangs", 1)
    process.send_signal(number)
    code = process.wait(60)
    result = strictly_read(tmp_path / "result.json")
    statuses = [section["status"] for section in result["sections"]]
    assert [len(section["rows"]) for section in result["sections"]] == [1, 1, 0]
    if number is signal.SIGKILL:
        assert (code, result["state"], statuses) == (-signal.SIGKILL, "running", ["passed", "running", "skipped"])
    else:
        assert (code, result["state"], statuses) == (130, "interrupted", ["passed", "interrupted", "skipped"])
        assert result["sections"][2]["error"]["message"] == "the run was interrupted"


def wait_for(path: Path, name: str, rows: int) -> dict[str, Any]:
    """What is in a result once a section has so many rows in it."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if path.exists():
            result = strictly_read(path)  # whole at any time
            if any(s["name"] == name and len(s["rows"]) >= rows for s in result["sections"]):
                return result
        time.sleep(0.05)
    raise AssertionError(f"{name} has no row in {path}")


def test_the_parent_imports_nothing_that_could_break() -> None:
    code = (
        "import sys; import benchmarks.device_check.__main__;"
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'dsv4_compile', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
