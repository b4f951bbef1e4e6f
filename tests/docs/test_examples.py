"""Each example runs and proves what it claims (the one that `make demo` runs has tests of its own)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from repository import EXAMPLES

Run = Callable[..., list[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.syspath_prepend(EXAMPLES)

    def run_example(name: str, *arguments: object) -> list[str]:
        importlib.import_module(name).main(*arguments)
        return capsys.readouterr().out.splitlines()

    return run_example


def test_every_example_is_tested_here_or_as_the_demo() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("[!_]*.py")}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert scripts - tested == {"serve_checkpoint"}


def test_compile_attention(run: Run) -> None:
    printed = run("compile_attention", [])
    assert printed[0] == "plan: runner mrv2 (asked for), region narrow"
    assert "    dsv4::sparse_indexer          split op" in printed
    assert printed[-4:-1] == [f"{call}: equal to the eager layer" for call in ("warm-up", "capture", "replay")]


def test_your_own_op(run: Run) -> None:
    found_out, *ways, refused = run("your_own_op", [])
    assert found_out == "not registered: planned again 1 time"
    assert refused.startswith("registered as captured: Tensor.__int__ needs a device-to-host sync while piece_0")
    assert "your_own_op.py" in refused
    plan = "2 pieces captured; eager: my_engine::attend (split op); the result is equal"
    assert ways == [f"named in the options: {plan}", f"registered: {plan}"]


def test_inspect_partition(run: Run, tmp_path: Path) -> None:
    printed = run("inspect_partition", [str(tmp_path)])
    names = {line.split()[0] for line in printed[: printed.index("")]}
    assert names >= {f"graph_0/{name}" for name in ("00_dynamo.py", "plan.txt", "piece_0.py", "region_0.py")}
    assert all((tmp_path / name).is_file() for name in names)
    assert "    # region_0" in printed[printed.index("program of batches of 8 tokens:") :]


def test_inspect_partition_in_a_temporary_folder(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("inspect_partition", [])[0].startswith("graph_0/00_dynamo.py  # dynamo: ")
    assert list(tmp_path.iterdir()) == []


def test_capture_buckets(run: Run) -> None:
    printed = run("capture_buckets", [])
    assert printed[0].startswith("warmed up: Counters(graphs_compiled=1, ")
    assert " captures=3, replays=3," in printed[0]
    assert printed[-1] == "equal to what the model answers without a compiler"


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("compile_attention", ["--bogus"], "unrecognized arguments: --bogus"),
        ("your_own_op", ["a", "b"], "unrecognized arguments: a b"),
        ("capture_buckets", ["3"], "unrecognized arguments: 3"),
        ("inspect_partition", ["a", "b"], "unrecognized arguments: b"),
        ("inspect_partition", ["a", "--svg", "b"], "FOLDER and --svg are two commands"),
        ("inspect_partition", ["--svg", "/no/such/folder/x"], "cannot write '/no/such/folder/x'"),
        ("inspect_partition", [__file__], "option dump_dir="),
    ],
)
def test_a_wrong_argument_gets_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main(arguments)
    assert stopped.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {complaint}")
