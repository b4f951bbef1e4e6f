"""The example that `make demo` runs: it proves its own claim, and says in one line what is wrong with its arguments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "serve_checkpoint.py"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = importlib.util.spec_from_file_location("serve_checkpoint", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("runner", ["mrv1", "mrv2"])
def test_it_serves_what_transformers_generates(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], runner: str
) -> None:
    assert demo.main(["--tokens", "3", "--layers", "3", "--runner", runner]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "all tokens equal transformers' own generate (5 of 5 requests)"
    assert printed[1].startswith("                              'Hi' -> ")
    assert len(printed[1].split("->")[1].split()) == 3


def test_the_checkpoint_is_made_once_and_can_be_named(demo: ModuleType, tmp_path: Path) -> None:
    folder = demo.tiny_checkpoint(2)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo.tiny_checkpoint(2) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "dsv4_compile").iterdir()] == ["tiny-2-layers"]
    assert demo.main(["--model", str(folder), "--tokens", "1"]) == 0


def test_a_difference_is_an_exit_code(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.reference
    monkeypatch.setattr(
        demo, "reference", lambda model, prompt, tokens: [-1] if len(prompt) == 2 else right(model, prompt, tokens)
    )
    assert demo.main(["--tokens", "1", "--layers", "1"]) == 1
    assert "tokens DIFFER from transformers' own generate in 1 of 5 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "argument --tokens: '0' is not a whole number of at least 1"),
        (["--layers", "many"], "argument --layers: 'many' is not a whole number of at least 1"),
        (["--runner", "mrv3"], "argument --runner: invalid choice: 'mrv3'"),
        (["--model", ".", "--layers", "2"], "--layers is for the small random checkpoint"),
        (["--speed", "3"], "unrecognized arguments: --speed 3"),
        (["--model", "no-such-folder"], "no checkpoint folder at no-such-folder"),
        (["--layers", "1", "--tokens", "4000"], "max_model_len is 4300"),
    ],
)
def test_a_wrong_argument_gets_one_line(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = demo.main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {message}")
