"""What README.md, CONTRIBUTING.md and docs/ print works as printed: code blocks, commands with their options, links."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import FENCE, PAGES, README, blocks, headings
from paging import tiny_config
from repository import ROOT
from runner_helpers import make_runner

import dsv4_compile
from dsv4_compile.models.deepseek_v4 import AttentionStack
from dsv4_compile.runners import ModelRunnerV2

# `a | b` and [c] in a printed command stand for a choice
PLACEHOLDER = re.compile(r"[|\[\]{}]")

LIBRARY = torch.library.Library("my_engine", "FRAGMENT")  # the ops that README registers
LIBRARY.define("attention(Tensor q, Tensor(a!) out) -> ()")
LIBRARY.define("kv_insert(Tensor kv, Tensor slot_mapping, Tensor(a!) cache) -> ()")
LIBRARY.define("legacy_insert(Tensor kv, Tensor(a!) cache) -> ()")


def printed_commands(page: Path) -> list[str]:
    """Lines of shell blocks, and what stands in backticks in the text."""
    lines = [line for block in blocks(page, "sh", "bash", "shell") for line in block.splitlines()]
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return lines + [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def commands_of(program: str) -> list[str]:
    """Every printed command of a program, once."""
    lines = (command.partition("#")[0].strip() for page in PAGES for command in printed_commands(page))
    found = (re.sub(r"^(\w+=\S+\s+)*", "", line) for line in lines)  # A=1 python ... sets a variable first
    return sorted({command for command in found if re.match(rf"{program}\s", command)})


@pytest.fixture
def names() -> dict[str, object]:
    """The names that the blocks leave to the reader."""
    model = AttentionStack(tiny_config())
    runner = make_runner(model, ModelRunnerV2)

    def inputs_of(num_tokens: int) -> tuple[object, ...]:
        inputs = runner.padding_inputs(num_tokens)
        return inputs.input_ids, inputs.positions, inputs.step

    return {
        "model": model,
        **dict(zip(("input_ids", "positions", "step"), inputs_of(4), strict=True)),
        "inputs_of": inputs_of,
    }


def test_the_code_blocks_of_the_readme(names: dict[str, object]) -> None:
    code = blocks(README, "python")
    exec(compile(code[0], "README.md", "exec"), names)
    with torch.no_grad():
        expected = names["model"](names["input_ids"], names["positions"], names["step"])
    torch.testing.assert_close(names["logits"], expected)
    # as its comment says: warm-up, capture, replay
    assert (dsv4_compile.counters.captures, dsv4_compile.counters.replays) == (1, 2)
    for block in code[1:]:
        exec(compile(block, "README.md", "exec"), names)


OTHER_PAGES = [page for page in PAGES[1:] if blocks(page, "python")]


COMPLETE = ROOT / "docs" / "serving.md"  # leaves no name to the reader


@pytest.mark.parametrize("page", [page for page in OTHER_PAGES if page != COMPLETE], ids=lambda page: page.name)
def test_the_code_blocks_of_a_page(
    page: Path, names: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.exhaustive
def test_the_program_that_serves_a_checkpoint_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    program, *others = blocks(COMPLETE, "python")
    names: dict[str, object] = {}
    exec(compile(program, COMPLETE.name, "exec"), names)
    # for each runner one graph, two sizes with a warm-up each
    counts = dsv4_compile.counters
    assert (counts.graphs_compiled, counts.captures, counts.uncaptured_calls, counts.recaptures) == (2, 4, 4, 0)
    assert f"{names['expected']} {counts}" in capsys.readouterr().out
    assert [len(answer) for answer in names["expected"]] == [8, 8]  # type: ignore[attr-defined]
    for block in others:
        exec(compile(block, COMPLETE.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_is_a_block_that_the_tests_see(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert {language for language, _ in FENCE.findall(text)} <= {"python", "sh", "text", ""}
    assert [block for block in blocks(page, "") if re.search(r"^\s*(import|from) ", block, re.MULTILINE)] == []
    # a fence that is indented, or has a title, would be a block that nobody runs
    assert re.findall(r"```|~~~", FENCE.sub("", text)) == []


@pytest.mark.sampled(11)
@pytest.mark.parametrize("command", commands_of("python"))
def test_a_printed_python_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    words = shlex.split(command)[1:]
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, f"{command}: no module {words[1]}"
    elif not words[0].startswith("-"):
        assert (ROOT / words[0]).is_file(), f"{command}: no file {words[0]}"
    assert [word for word in words[2:] if word.endswith(".py") and not (ROOT / word).is_file()] == [], command
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    if options or words[:2] == ["-m", "dsv4_compile"]:
        usage = help_text(words)
        assert {option for option in options if option not in usage} == set()


def help_text(words: list[str]) -> str:
    """What the command prints for --help; of ours, for its subcommand."""
    program = words[:2] if words[0] == "-m" else words[:1]
    subcommand = [word for word in words[2:3] if program[-1] == "dsv4_compile" and not PLACEHOLDER.search(word)]
    shown = subprocess.run(
        [sys.executable, *program, *subcommand, "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


@pytest.mark.parametrize("command", commands_of("make"))
def test_a_printed_make_command(command: str) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert command.split()[1] in targets


def parameter_addresses(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, parameter_address = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not parameter_address or parameter_address in parameter_addresses(target), link


def test_there_is_something_to_check() -> None:
    assert "python examples/serve_checkpoint.py" in commands_of("python")
    assert "make demo" in commands_of("make")
    assert "python -m pytest tests/passes/test_plan_snapshots.py" in commands_of("python")  # after EXPECTTEST_ACCEPT=1
    assert len(blocks(README, "python")) >= 2
    assert {page.stem for page in OTHER_PAGES} >= {"adding_an_op", "adding_a_pass", "capture_semantics"}
