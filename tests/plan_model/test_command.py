"""`python -m dsv4_compile plan`: one plan of a small configuration, and what makes no sense."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from released_configs import RELEASED
from repository import ROOT

from dsv4_compile.inspect.cli import main
from dsv4_compile.plan_model.command import add_plan_command, memory_size, parameter_count, token_counts
from dsv4_compile.plan_model.tables import CACHES, MEMORY, ROOM, STEP

# a layer of each compressed kind, sizes that every cache format takes
SMALL = {
    **RELEASED,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "o_lora_rank": 8,
    "o_groups": 2,
    "compress_ratios": [4, 128, 0],
    "index_topk": 8,
    "max_position_embeddings": 4096,
    "vocab_size": 97,
}


def plan(*arguments: str) -> int:
    return main(["plan", *arguments], more=[add_plan_command])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a command that makes no sense; nothing else is printed."""
    try:
        code: Any = plan(*arguments)
    except SystemExit as stopped:
        code = stopped.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    (said,) = shown.err.splitlines()
    return said


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def test_a_plan_as_json_and_as_a_page(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    arguments = ("--tokens", "8,1,8", "--runner", "mrv2", "--json", "--output", str(page), "--parameters", "1.5M")
    assert plan("--model", small, *arguments) == 0
    shown = capsys.readouterr()
    assert shown.err == f"wrote {page}\n"
    answer = json.loads(shown.out)
    # per layer forward_mqa, and the indexer of C4A, which is in a region with it; pieces around the two regions
    assert answer["launches"] == {
        "by_hand": 3,
        "graphs": 3,
        "copies": 1,
        "captured_ops": answer["launches"]["captured_ops"],
        "duplicates": 0,
        "total": 7,
    }
    assert answer["step_us"] == 28.0
    assert [bucket["tokens"] for bucket in answer["buckets"]] == [1, 8]
    one, eight = answer["buckets"]
    assert one["lower_bound"] <= one["workspace"] < eight["workspace"] < eight["unshared"]
    assert (one["outputs"], eight["outputs"]) == (256, 1792)  # bf16 logits of 97 words, aligned to 256
    room = answer["room"]
    assert room["weights"] == 3_000_000
    parts = ("weights", "buffers", "workspace", "eager", "captured", "left")
    assert sum(room[part] for part in parts) == room["memory"] == 80 << 30
    assert [cache["kv_cache_dtype"] for cache in room["caches"]] == ["bf16", "fp8_ds_mla", "fp8_ds_mla"]
    assert all(cache["tokens"] % 256 == 0 for cache in room["caches"])
    check_page(page.read_text())


def check_page(text: str) -> None:
    """It has every table, loads nothing, and runs nothing."""
    assert re.findall(r"(?:src|href)=|<script|@import|url\(", text) == []
    columns = re.findall(r"<th[^>]*>([^<]*)</th>", text)
    assert columns == [*STEP, *MEMORY, *ROOM, *CACHES]
    assert text.count("estimate") > 3
    assert "<td>bf16</td>" in text


@pytest.mark.exhaustive
def test_the_text_of_a_plan_from_a_fresh_process(small: str) -> None:
    command = [
        sys.executable,
        "-m",
        "dsv4_compile",
        "plan",
        "--model",
        small,
        "--runner",
        "mrv1",
        "--region",
        "minimal",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "runner mrv1 (asked for), region minimal" in shown
    for columns in (STEP, MEMORY, ROOM, CACHES):
        assert re.search(r" +\| +".join(map(re.escape, filter(None, columns))), shown), columns


@pytest.mark.exhaustive
def test_a_region_too_narrow_for_the_runner(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", small, "--runner", "mrv1", "--region", "narrow") == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "reads the step state" in said


@pytest.mark.parametrize("tokens", ["0", "-8", "8.0", "8,", "", "8 16", "1e3", "٨", "eight", "1048577", "9" * 5000])
def test_token_counts_that_are_none(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--model", "flash", f"--tokens={tokens}")
    assert "is no token count: give integers from 1 to 1048576 with commas between, as 1,8,64,512,8192" in said


@pytest.mark.parametrize("size", ["80", "80G", "GiB", "-80GiB", "0GiB", "80 gigabytes", "1e3GiB", "", "nanGiB"])
def test_sizes_that_are_none(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--model", "flash", f"--gpu-memory={size}")
    assert f"{size!r} is no size: give a number with its unit, as 80GiB or 141GB" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: --model"),
        (["--model", "flash", "--launch-us", "nan"], "'nan' is no time of a launch"),
        (["--model", "flash", "--launch-us", "-1"], "'-1' is no time of a launch"),
        (["--model", "flash", "--launch-us", "inf"], "'inf' is no time of a launch"),
        (["--model", "flash", "--requests", "1"], "'1' is no number of requests: give an integer from 2"),
        (["--model", "flash", "--parameters", "many"], "'many' is no number of parameters"),
        (["--model", "flash", "--parameters", "0"], "'0' is no number of parameters"),
        (["--model", "flash", "--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
        (["--model", "flash", "--region", "tiny"], "argument --region: invalid choice: 'tiny'"),
        (["--model", "flsh"], "--model 'flsh' is no file: did you mean 'flash'? Give flash, pro or the path"),
        (["--model", "no/such/config.json"], "--model 'no/such/config.json' is no file. Give flash, pro"),
        (["--model", "pro", "--output", "no/such/folder/a.html"], "cannot write 'no/such/folder/a.html'"),
        (["--model", "pro", "--output", "."], "cannot write '.': give a file in a folder that exists"),
    ],
)
def test_what_makes_no_sense_gets_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "is no JSON: "),
        (b"\xff\xfe", "is no JSON: "),
        (b"", "is no JSON: "),
        (b"[1]", "it must be a dict"),
        (b'{"model_type": "llama", "hidden_size": 64}', "has neither compress_ratios nor layer_types"),
        (json.dumps({**SMALL, "hidden_size": None}).encode(), "the configuration lacks hidden_size"),
        (json.dumps({**SMALL, "hidden_size": "64"}).encode(), "hidden_size"),
        (json.dumps({**SMALL, "compress_ratios": [3, 3, 3]}).encode(), "layer 0 has compression ratio 3"),
        (json.dumps({**SMALL, "compress_ratios": 4}).encode(), "compress_ratios"),
        (b"[" * 100_000, "is no JSON: "),
    ],
)
def test_a_file_that_is_no_configuration(content: bytes, complaint: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert complaint in refused(capsys, "--model", str(path))


def test_sizes_that_no_tensor_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "hidden_size": 1 << 60}))
    assert plan("--model", str(path)) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: planning '.*config\.json' raised RuntimeError: ", said)


def test_a_folder_without_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no file. Give flash, pro or the path of a config.json" in refused(capsys, "--model", str(tmp_path))


def test_what_numbers_mean() -> None:
    assert token_counts("64, 8,8,007") == (7, 8, 64)
    assert [memory_size(text) for text in ("1KiB", "1.5 kb", "80GiB", "141GB")] == [1024, 1500, 80 << 30, 141 * 10**9]
    assert [parameter_count(text) for text in ("7", "21.3B", "1.6T")] == [7, 21_300_000_000, 1_600_000_000_000]


def test_a_command_line_without_models_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan"])
    assert "invalid choice: 'plan'" in capsys.readouterr().err
