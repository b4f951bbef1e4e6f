"""The command line: `python -m dsv4_compile explain | report | doctor | plan`.

`explain MODULE:FUNCTION` prints a plan. FUNCTION takes no arguments and returns `(model, args)` or
`(model, args, kwargs)`: a module or function, and the arguments of the call to explain. `report DIR` makes one HTML
page of what the option `dump_dir` wrote, or prints the same as JSON. `doctor` says whether the backend can be used
here. `plan` is about models, which nothing here knows: `__main__` adds it (`plan_model/command.py`).

Exit code 0 for an answer; 1 for a model that the backend refuses or that fails, or a machine where it cannot be used;
2 for a command that makes no sense. Errors are one line on standard error, those that the user's own module raises
too. Even `--help` imports torch: `python -m` imports the package first, and that registers its ops with torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, get_args

import torch

from ..config import Decode, Region, Runner
from ..errors import Dsv4Error, ExplainError, OptionError, UnknownOpError
from .arguments import OneLineParser
from .explain import explain

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[OneLineParser]

AddCommand: TypeAlias = "Callable[[Commands], None]"
Call = tuple[Callable[..., object], Sequence[object], Mapping[str, object]]
_NOT_THE_USERS = tuple(
    os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__), importlib.__file__)
)


def main(arguments: Sequence[str] | None = None, more: Iterable[AddCommand] = ()) -> int:
    """Run one command and return the exit code.

    Args:
        arguments: of the command line.
        more: each adds a command, whose `run` takes the parsed options and returns the exit code.
    """
    options = _parser(more).parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        code = run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        return 0
    return code


def _explain(options: argparse.Namespace) -> int:
    try:
        model, args, kwargs = load_call(options.target)
    except ExplainError as error:
        return _complain(error, 2)
    try:
        plan = explain(model, *args, options=_backend_options(options), **kwargs)
    except (OptionError, UnknownOpError) as error:  # such as an unknown --split-op
        return _complain(error, 2)
    except Dsv4Error as error:
        return _complain(error, 1)
    except Exception as error:  # the model's own, or Dynamo's about the model
        hint = "dsv4_compile.explain shows the traceback"
        return _complain(ExplainError(f"tracing {options.target} raised {_described(error)}; {hint}"), 1)
    print(plan.to_json() if options.json else plan)
    return 0


def _report(options: argparse.Namespace) -> int:
    # imported when needed: the template engine is of no use to the other commands
    from .report.page import write_report
    from .report.report_json import report_json

    try:
        answer = report_json(options.folder) if options.json else write_report(options.folder, options.output)
    except ExplainError as error:
        return _complain(error, 2)
    print(answer)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    # imported when needed: it compiles something
    from .doctor import diagnose

    diagnosis = diagnose()
    print(diagnosis.to_json() if options.json else diagnosis)
    return 0 if diagnosis.problem is None else 1


def load_call(target: str) -> Call:
    """Import MODULE, call FUNCTION and check what it returns.

    Raises:
        ExplainError: the text, the module, the function or its result is not what it should be, or one of them raises.
    """
    module_name, colon, function_name = target.partition(":")
    if not (all(module_name.split(".")) and colon and function_name):
        raise ExplainError(f"{target!r} is not MODULE:FUNCTION, such as my_model:example")
    sys.path.insert(0, os.getcwd())  # as `python -m` does for scripts in the current folder
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ExplainError(f"cannot import {module_name!r}: {_described(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ExplainError(f"module {module_name!r} has no function {function_name!r}")
    try:
        result = function()
    except Exception as error:
        raise ExplainError(f"{target} raised {_described(error)}") from error
    return _checked(target, result)


def _checked(target: str, result: object) -> Call:
    if (
        isinstance(result, tuple)
        and len(result) in (2, 3)
        and callable(result[0])
        and isinstance(result[1], (tuple, list))
    ):
        kwargs = result[2] if len(result) == 3 else {}
        if isinstance(kwargs, Mapping):
            return result[0], result[1], kwargs
    raise ExplainError(f"{target} must return (model, args) or (model, args, kwargs), not {type(result).__name__}")


def _described(error: Exception) -> str:
    """ "ValueError: no weights (my_model.py:12)": an error on one line, and the innermost line of the user's."""
    message = textwrap.shorten(str(error), 400, placeholder=" ...")
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if os.path.isfile(frame.filename) and not frame.filename.startswith(_NOT_THE_USERS)
    ]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {message}{place}"


def _backend_options(options: argparse.Namespace) -> dict[str, object]:
    named = {name: getattr(options, name) for name in ("runner", "region", "decode")}
    return {**named, "split_ops": tuple(options.split_op)}


def _complain(error: Dsv4Error, code: int) -> int:
    message = str(error).partition("\n")[0]
    print(f"error: {message}", file=sys.stderr)
    return code


def _parser(more: Iterable[AddCommand]) -> argparse.ArgumentParser:
    parser = OneLineParser(prog="python -m dsv4_compile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_explain(commands.add_parser("explain", help="print what is captured, what is eager and why"))
    _add_report(commands.add_parser("report", help="make an HTML page of what the option dump_dir wrote"))
    doctor = commands.add_parser("doctor", help="say whether the backend can be used here, and what it would choose")
    doctor.add_argument("--json", action="store_true", help="the answer as JSON")
    doctor.set_defaults(run=_doctor)
    for add_command in more:
        add_command(commands)
    return parser


def _add_explain(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="MODULE:FUNCTION", help="returns (model, args) or (model, args, kwargs)")
    command.add_argument("--runner", choices=get_args(Runner), default="auto")
    command.add_argument("--region", choices=get_args(Region), default="runner")
    command.add_argument("--decode", choices=get_args(Decode), default="auto")
    command.add_argument("--split-op", action="append", default=[], metavar="NS::OP", help="may be repeated")
    command.add_argument("--json", action="store_true", help="the plan as JSON")
    command.set_defaults(run=_explain)


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, metavar="DIR", help="the dump folder, or one graph_<n> in it")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--output", type=Path, metavar="FILE", help="the page to write (default: DIR/report.html)")
    form.add_argument("--json", action="store_true", help="print what the page shows as JSON, and write no page")
    command.set_defaults(run=_report)
