"""What a person can look at: dump folder, logs, structured trace, command line, explain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import SUPPORT
from torch import Tensor
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile.config import Config
from dsv4_compile.errors import ExplainError, OptionError
from dsv4_compile.inspect.cli import main

PROGRAM = """
import torch, toy_ops
def layer(x):
    return torch.ops.toy.fresh(x + 1) * 2
compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options={"split_ops": ["toy::fresh"]})
for _ in range(3):
    compiled(torch.ones(5, 4))
"""


def layer(x: Tensor) -> Tensor:
    return torch.ops.toy.fresh(x + 1) * 2


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=SUPPORT, env=environment, capture_output=True, text=True, check=True)


@pytest.mark.exhaustive
def test_the_backend_is_listed_without_an_import() -> None:
    program = (
        "import torch, sys; print('dsv4_piecewise' in torch._dynamo.list_backends(), 'dsv4_compile' in sys.modules)"
    )
    assert run_python(program).stdout.split() == ["True", "False"]


def test_dump_dir_holds_every_stage(tmp_path: Path) -> None:
    options: dict[str, Any] = {"split_ops": ["toy::fresh"], "dump_dir": str(tmp_path / "dump")}
    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=options)
    for _ in range(3):
        compiled(torch.ones(5, 4))
    folder = tmp_path / "dump" / "graph_0"
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if not name[0].isdigit()] == [
        "piece_0.py",
        "piece_1.py",
        "plan.json",
        "plan.txt",
        "program_5_4.py",
        "region_0.py",
        "report.html",
    ]
    assert names[0] == "00_dynamo.py"
    assert names[1] == "01_inline_bodies.py"
    assert (folder / "05_decompose_sizes.py").read_text().startswith("# decompose_sizes: ")
    assert "_copy_in(args[2])" in (folder / "program_5_4.py").read_text()
    assert json.loads((folder / "plan.json").read_text())["units"][1]["ops"][0]["reason"] == "split op"


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_a_dump_dir_that_goes_away_costs_a_warning_and_no_call(
    calls_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that captures has done what it does by then: it must not fail, and be made again."""
    written: list[int] = []
    folder = tmp_path / "dump"
    write_text = Path.write_text

    def write(self: Path, text: str, **options: Any) -> int:
        written.append(1)
        if calls_before == 0 and len(written) > 5:
            raise OSError(28, "No space left on device")
        return write_text(self, text, **options)

    monkeypatch.setattr(Path, "write_text", write)
    options: dict[str, Any] = {"split_ops": ["toy::fresh"], "dump_dir": str(folder)}
    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=options)
    for call in range(4):
        if call == calls_before and call:
            shutil.rmtree(folder)
        assert torch.equal(compiled(torch.ones(5, 4)), layer(torch.ones(5, 4)))
    warnings = [record.getMessage() for record in caplog.records if "dumped" in record.getMessage()]
    assert len(warnings) == (calls_before < 2)  # the program is written in the second call
    assert all(str(folder) in warning for warning in warnings)
    assert (dsv4_compile.counters.captures, dsv4_compile.counters.replays) == (1, 3)


@pytest.mark.parametrize("calls_before", [1, 2, 3])
def test_a_relative_dump_dir_stays_where_it_was_when_the_program_moves_on(
    calls_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"split_ops": ["toy::fresh"], "dump_dir": os.path.join("dump", "..", "kept")}
    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=options)
    for call in range(4):
        if call == calls_before:
            os.chdir("elsewhere")
        compiled(torch.ones(5, 4))
    assert (tmp_path / "kept" / "graph_0" / "program_5_4.py").is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_relative_dump_dir_of_a_folder_that_is_gone_is_an_option_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(OptionError, match="option dump_dir='dump' is relative, and the current folder is gone"):
        Config.from_options({"dump_dir": "dump"})


def test_graphs_and_processes_share_a_dump_dir(tmp_path: Path) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        options: dict[str, Any] = {"split_ops": ["toy::fresh"], "dump_dir": tmp_path}
        torch.compile(layer, backend="dsv4_piecewise", options=options)(torch.ones(5, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph_0", "graph_1"]


def test_a_dump_dir_that_cannot_be_made_is_an_option_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options: dict[str, Any] = {"dump_dir": str(tmp_path / "file")}
    with pytest.raises(OptionError, match="cannot make a folder there"):
        torch.compile(layer, backend="dsv4_piecewise", options=options)(torch.ones(5, 4))


@pytest.mark.exhaustive
def test_torch_logs_show_plan_and_stages() -> None:
    logged = run_python(PROGRAM, TORCH_LOGS="+dsv4_compile").stderr
    assert "plan: runner mrv2" in logged
    assert "# infer_effects: " in logged
    assert "def program(args):" in logged


@pytest.mark.exhaustive
def test_the_structured_trace_has_the_plan(tmp_path: Path) -> None:
    run_python(PROGRAM, TORCH_TRACE=str(tmp_path))
    text = "\n".join(path.read_text() for path in tmp_path.iterdir())
    assert '"name": "dsv4_plan.txt"' in text
    assert "region_0  eager, 1 op" in text


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import torch
from toy_ops import SPLIT

def example():
    return (lambda x: torch.ops.toy.fresh(x + 1)), (torch.ones(5, 4),)

def no_call():
    return 3

def failing():
    raise ValueError("no weights" + chr(10) + "here")

def too_few():
    return (lambda x, y: x + y), (torch.ones(5, 4),)

def wrong_shapes():
    return (lambda x, y: x @ y), (torch.ones(5, 4), torch.ones(5, 4))

def raising():
    def model(x):
        raise KeyError("slot")
    return model, (torch.ones(5, 4),)

def step_state():
    def model(x, slots, cache):
        torch.ops.toy.kv_write(x, slots, cache)
        return torch.ops.toy.fresh(x)
    return model, (), {"x": torch.ones(5, 4), "slots": torch.arange(5), "cache": torch.zeros(8, 4)}
"""
    (folder / "my_model.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)


def test_explain_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(tmp_path, monkeypatch)
    assert main(["explain", "my_model:example", "--split-op", "toy::fresh"]) == 0
    assert "toy::fresh  split op" in capsys.readouterr().out
    assert main(["explain", "my_model:example", "--split-op", "toy::fresh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runner"] == "mrv2"


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("my_model", "'my_model' is not MODULE:FUNCTION"),
        ("no_such_module:example", "cannot import 'no_such_module'"),
        ("my_model:nothing", "module 'my_model' has no function 'nothing'"),
        ("my_model:no_call", "must return (model, args) or (model, args, kwargs), not int"),
        (".my_model:example", "'.my_model:example' is not MODULE:FUNCTION"),
        ("my_model.:example", "'my_model.:example' is not MODULE:FUNCTION"),
        ("unfinished:example", "cannot import 'unfinished': SyntaxError: "),
        ("needy:example", "cannot import 'needy': ModuleNotFoundError: No module named 'no_such_part' ("),
        ("needy:example", "needy.py:1)"),
        ("my_model:failing", "my_model:failing raised ValueError: no weights here ("),
        ("my_model:failing", "my_model.py:12)"),
    ],
)
def test_explain_command_refuses_in_one_line(
    target: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_module(tmp_path, monkeypatch)
    (tmp_path / "unfinished.py").write_text("def example(:")
    (tmp_path / "needy.py").write_text("import no_such_part")
    assert main(["explain", target]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("too_few", "<lambda>() missing 1 required positional argument: 'y'; "),
        ("wrong_shapes", "a and b must have same reduction dim"),
        ("raising", "KeyError: 'slot' ("),
    ],
)
def test_explain_command_says_in_one_line_what_the_model_raises(
    name: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_module(tmp_path, monkeypatch)
    assert main(["explain", f"my_model:{name}"]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert error[0].startswith(f"error: tracing my_model:{name} raised ")
    assert complaint in error[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["show"], "argument COMMAND: invalid choice: 'show'"),
        (["explain"], "the following arguments are required: MODULE:FUNCTION"),
        (["explain", "my_model:example", "--runner", "mrv3"], "argument --runner: invalid choice: 'mrv3'"),
        (["explain", "my_model:example", "--split-op", "no::op"], "torch knows no op 'no::op': "),
        (["report"], "the following arguments are required: DIR"),
        (["doctor", "now"], "unrecognized arguments: now"),
    ],
)
def test_a_command_that_makes_no_sense_gets_one_line(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_module(tmp_path, monkeypatch)
    try:
        code: Any = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {complaint}")


def test_explain_command_reports_a_hazard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_module(tmp_path, monkeypatch)
    dsv4_compile.register_op("toy::kv_write", role="prepare", step_state=("slots",))
    arguments = ["explain", "my_model:step_state", "--split-op", "toy::fresh", "--runner", "mrv1", "--region", "narrow"]
    assert main(arguments) == 1
    assert "reads the step state slots" in capsys.readouterr().err


def test_explain_changes_nothing_and_never_wears_out() -> None:
    cache = torch.zeros(5, 4)

    def model(x: Tensor) -> Tensor:
        cache.add_(x)
        return torch.ops.toy.fresh(cache)

    plans = {str(dsv4_compile.explain(model, torch.ones(5, 4), options={"split_ops": SPLIT})) for _ in range(12)}
    assert len(plans) == 1  # more often than Dynamo recompiles one function
    assert cache.sum() == 0


def test_explain_of_a_compiled_module_is_that_of_the_module() -> None:
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(5, 4)
    assert str(dsv4_compile.explain(compiled, x)) == str(dsv4_compile.explain(model, x))


def test_explain_names_a_graph_break() -> None:
    def model(x: Tensor) -> Tensor:
        y = torch.ops.toy.fresh(x + 1)
        torch._dynamo.graph_break()
        return y * 2

    plan = dsv4_compile.explain(model, torch.ones(5, 4), options={"split_ops": ["toy::fresh"]})
    (note,) = plan.notes
    assert note.startswith("graph break: what follows is not in this plan")


def test_explain_of_nothing_is_an_error() -> None:
    with pytest.raises(ExplainError, match="traced no graph"):
        dsv4_compile.explain(lambda: 3)


def test_explain_of_what_cannot_be_called_is_an_error() -> None:
    with pytest.raises(ExplainError, match="3 cannot be called: give a module or a function"):
        dsv4_compile.explain(3, torch.ones(5, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [["a"], "runner", {"runner"}])
def test_options_that_are_no_dict_are_an_error(options: Any) -> None:
    with pytest.raises(OptionError, match="it must be a dict from option names to values"):
        dsv4_compile.explain(layer, torch.ones(5, 4), options=options)


def test_explain_reports_a_split_op_that_is_never_called() -> None:
    plan = dsv4_compile.explain(layer, torch.ones(5, 4), options={"split_ops": ["toy::fresh", "aten::bmm"]})
    assert plan.notes == ("split_ops names aten::bmm, which this graph never calls",)


def test_a_graph_without_a_split_op_works_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(lambda x: x * 2, backend="dsv4_piecewise", dynamic=True)
    for n in (5, 5, 5, 7):
        assert torch.equal(compiled(torch.ones(n, 4)), 2 * torch.ones(n, 4))
    assert [record.message for record in caplog.records if record.name == "dsv4_compile"] == [
        "the graph calls no split op: nothing in it is kept eager for attention"
    ]
