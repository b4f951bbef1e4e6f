"""The command line of the device check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from repository import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.device_check.__main__ import main
from benchmarks.device_check.arguments import parse
from benchmarks.device_check.catalogue import SECTIONS


def ids(*arguments: str) -> list[str]:
    return [spec.id for spec in parse(arguments).sections]


def test_sections_are_chosen_by_id_and_by_name_and_stay_in_order() -> None:
    everything = [f"S{number}" for number in range(12)]
    assert [spec.id for spec in SECTIONS] == ids() == everything
    assert ids("--only", "decode,s3,S0") == ["S0", "S3", "S5"]
    assert ids("--skip", "S1, tools") == [name for name in everything if name not in ("S1", "S10")]
    assert ids("--only", "S3,S4", "--skip", "hazards") == ["S4"]
    left_out = [spec.id for spec in parse(["--only", "S4"]).left_out]
    assert left_out == [name for name in everything if name != "S4"]


def test_time_boxes_are_set_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    boxes = {spec.id: (spec.box, spec.least) for spec in parse(["--boxes", "S5=7, hazards=300"]).sections}
    assert (boxes["S5"], boxes["S3"][0]) == ((7, 7), 300)
    assert main(["--boxes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[5] == f"S5   decode      80 s, needs 20  {SECTIONS[5].about}"
    assert lines[-1].split()[:2] == ["all", str(int(sum(spec.box for spec in SECTIONS)))]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "S77"], "there is no section 'S77': did you mean 'S7'? There are S0 facts, S1 contract, "),
        (["--skip", "decod"], "there is no section 'decod': did you mean 'decode'? There are "),
        (["--only", "zzz"], "there is no section 'zzz'. There are S0 facts, "),
        (["--only", "S3", "--skip", "S3"], "--only and --skip leave no section to run"),
        (["--boxes", "S5"], "--boxes has 'S5'; give S5=60, or S5=60,S2=30"),
        (["--boxes", "S5=soon"], "--boxes S5 is 'soon'; it must be a number of seconds above 0"),
        (["--boxes", "S77=3"], "there is no section 'S77'"),
        (["--deadline", "0"], "--deadline is '0'; it must be a number of seconds above 0"),
        (["--deadline", "nan"], "--deadline is 'nan'; it must be a number of seconds above 0"),
        (["--deadline", "inf"], "--deadline is 'inf'; it must be a number of seconds above 0"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--dry"], "--dry has sizes that say nothing about a GPU: give --device cpu too"),
        (["--device", "cpu"], "--device cpu needs --dry"),
        (["--quick"], "unrecognized arguments: --quick"),
        (["--out", __file__], "is no folder"),
    ],
)
def test_what_is_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    (said,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert complaint in said


def test_a_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--dry", "--out", f"{__file__}/out"]) == 2
    assert capsys.readouterr().err.startswith("error: [Errno 20] Not a directory")


def test_a_result_that_is_not_there_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--render", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
