"""The device check where the package is not installed: a copy of the tree, and an environment without it.

Every section runs on the CPU in tiny sizes. Nothing is judged but that no row is an error, and no check of a row fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.device_check.catalogue import SECTIONS
from benchmarks.device_check.headline import headline_of

FOLDERS = ("benchmarks", "dsv4_compile", "passes", "ops", "examples", "tests/support", "tests/runtime/engines")
FILES = ("tests/conftest.py", "pyproject.toml")
# a busy machine must not make a test fail: what boxes do is tested with sections that hang
AMPLE = ("--deadline", "5000", "--boxes", ",".join(f"{spec.id}=400" for spec in SECTIONS))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is tracked, with a Python beside it that has all packages but this one."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS, *FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split():
        copied = folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copied.symlink_to(os.readlink(ROOT / name))
        else:
            copied.write_bytes((ROOT / name).read_bytes())
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder / "python")
    packages = next((folder / "python" / "lib").glob("python*/site-packages"))
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "dsv4" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    return folder


def run(checkout: Path, out: Path, *arguments: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(checkout / "python/bin/python"), "-m", "benchmarks.device_check"]
    command += ["--device", "cpu", "--dry", "--out", str(out), *AMPLE, *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    bad = [
        (s["id"], r["case"], r["metric"], r["value"], r["error"])
        for s in found["sections"]
        for r in s["rows"]
        if r["ok"] is False or r["error"]
    ]
    assert (done.returncode, bad) == (0, []), done.stdout + done.stderr
    assert len(done.stdout) <= 8_000
    return found


@pytest.mark.exhaustive
def test_two_sections(checkout: Path, tmp_path: Path) -> None:
    found = run(checkout, tmp_path, "--only", "facts,hazards")
    assert found["machine"]["installed"] == "not installed"
    assert {s["id"] for s in found["sections"] if s["status"] == "passed"} == {"S0", "S3"}
    assert (found["dry"], found["device"], set(found["headline"])) == (True, "cpu", set(headline_of({})))
    hazards = {r["case"]["id"] for r in found["sections"][3]["rows"]}
    assert hazards == {"A1", "A2", "A3", "A4", "A5", "B2", "B3", "B4", "B5", "B6", "B7", "B8"}


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_all_sections(checkout: Path, tmp_path: Path) -> None:
    found = run(checkout, tmp_path)
    assert [s["status"] for s in found["sections"]] == ["passed"] * 12
    headline = found["headline"]
    assert (headline["a_correct"], headline["b_stable"]) == ("14/14", True)
    # what a dry run has in other sizes than the headline asks for is not in it
    missing = {name for name, value in headline.items() if value is None}
    assert missing == {"i_capture_s_61"}
    assert None not in headline["c_decode_us"].values()
