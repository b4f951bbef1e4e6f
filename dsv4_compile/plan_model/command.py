"""`python -m dsv4_compile plan --model flash|pro|CONFIG.json`: what a model will take, before a GPU is there.

It prints launches, workspace, estimates of captured memory and capture time, and the context that fits on a GPU, for
each token count; with `--output` it writes the same as an HTML page. The exit codes are those of the other commands.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from ..config import Config, Region, Runner
from ..errors import Dsv4Error, ExplainError, UnsupportedConfigError, did_you_mean

if TYPE_CHECKING:
    from ..inspect.cli import Commands
    from ..models.deepseek_v4 import DeepseekV4Config

RELEASED = ("flash", "pro")
TOKENS = "1,8,64,512,8192"
MOST_TOKENS = 1 << 20  # of a step; beyond any batch, and sizes of tensors still fit their integers
MOST_REQUESTS = 1 << 16
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
WEIGHTS_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn}
_BASES = {"iB": 1024, "B": 1000}
_UNITS: dict[str, int] = {
    f"{prefix}{end}".lower(): base**power for power, prefix in enumerate("KMGT", 1) for end, base in _BASES.items()
}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def add_plan_command(commands: Commands) -> None:
    """Add `plan` to the commands of `inspect.cli`."""
    command = commands.add_parser(
        "plan", help="say what a DeepSeek V4 model will take: launches, memory, context; planned without its memory"
    )
    command.add_argument("--model", required=True, metavar="flash|pro|CONFIG.json", help="a released model, or a file")
    command.add_argument("--tokens", type=token_counts, default=TOKENS, metavar="N,N,...", help=f"default: {TOKENS}")
    command.add_argument("--runner", choices=get_args(Runner), default="auto")
    command.add_argument("--region", choices=get_args(Region), default="runner")
    command.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the model (default: bf16)")
    command.add_argument(
        "--weights-dtype", choices=tuple(WEIGHTS_DTYPES), help="in which weights are counted (--dtype)"
    )
    command.add_argument(
        "--parameters", type=parameter_count, metavar="COUNT", help="on the GPU, as 21.3B (those of the stack)"
    )
    command.add_argument("--requests", type=request_count, default=16, help="that run at once (default: 16)")
    command.add_argument("--gpu-memory", type=memory_size, default="80GiB", metavar="SIZE", help="default: 80GiB")
    command.add_argument(
        "--launch-us", type=microseconds, default=4.0, metavar="US", help="host time of a launch (default: 4)"
    )
    command.add_argument("--json", action="store_true", help="the answer as JSON")
    command.add_argument("--output", type=Path, metavar="FILE.html", help="write it as a page too")
    command.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    # imported when needed: they import Dynamo
    from .make import Question, plan_model
    from .show import plan_text, write_plan_page

    try:
        question = Question(
            model=options.model,
            config=read_model(options.model),
            tokens=options.tokens,
            options=Config(runner=options.runner, region=options.region, piece_compiler="eager"),
            dtype=DTYPES[options.dtype],
            weights_dtype=WEIGHTS_DTYPES[options.weights_dtype or options.dtype],
            parameters=options.parameters,
            requests=options.requests,
            gpu_memory=options.gpu_memory,
            launch_us=options.launch_us,
        )
        if options.output is not None:
            _check_output(options.output)  # before the work, which takes a while
    except (UnsupportedConfigError, ExplainError) as error:
        return _complain(error, 2)
    try:
        plan = plan_model(question)
    except Dsv4Error as error:
        return _complain(error, 1)
    except RuntimeError as error:  # torch's, of sizes that no tensor can have
        return _complain(ExplainError(f"planning {options.model!r} raised {type(error).__name__}: {error}"), 1)
    print(plan.to_json() if options.json else plan_text(plan))
    if options.output is not None:
        try:
            write_plan_page(plan, options.output)
        except ExplainError as error:
            return _complain(error, 2)
        print(f"wrote {options.output}", file=sys.stderr)
    return 0


def read_model(name: str) -> DeepseekV4Config:
    """The configuration of a released model, or of a file.

    Raises:
        UnsupportedConfigError: neither, or one that this package does not build.
    """
    from ..models.deepseek_v4 import DeepseekV4Config

    if name in RELEASED:
        return DeepseekV4Config.flash() if name == "flash" else DeepseekV4Config.pro()
    try:
        return DeepseekV4Config.from_hf(Path(name))
    except FileNotFoundError as error:
        hint = did_you_mean(name, RELEASED)
        raise UnsupportedConfigError(
            f"--model {name!r} is no file{hint} Give flash, pro or the path of a config.json"
        ) from error
    except OSError as error:
        raise UnsupportedConfigError(f"cannot read {name!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # text that is no JSON, or no text
        raise UnsupportedConfigError(f"{name!r} is no JSON: {error}") from error


def _check_output(output: Path) -> None:
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ExplainError(f"cannot write {str(output)!r}: give a file in a folder that exists with --output")


def _complain(error: Dsv4Error, code: int) -> int:
    message = str(error).partition("\n")[0]
    print(f"error: {message}", file=sys.stderr)
    return code


def token_counts(text: str) -> tuple[int, ...]:
    """ "1,8,64" as numbers in order, each once."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch(r"0*[1-9][0-9]{0,9}", word) or int(word) > MOST_TOKENS:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no token count: give integers from 1 to {MOST_TOKENS} with commas between, as {TOKENS}"
            )
    return tuple(sorted({int(word) for word in words}))


def request_count(text: str) -> int:
    """ "16" as a number; a request dim of 1 would be specialised."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,9}", text) or not 2 <= int(text) <= MOST_REQUESTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of requests: give an integer from 2 to {MOST_REQUESTS}"
        )
    return int(text)


def memory_size(text: str) -> int:
    """ "80GiB" as bytes."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([A-Za-z]+)", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give a number with its unit, as 80GiB or 141GB")
    return round(float(found[1]) * unit)


def parameter_count(text: str) -> int:
    """ "21.3B" or "21300000000" as a number."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBT]?)", text)
    count = round(float(found[1]) * _COUNTS[found[2]]) if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters: give one as 21.3B or 21300000000")
    return count


def microseconds(text: str) -> float:
    """ "4" as a number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no time of a launch: give microseconds, as 4 or 2.5")
    return value
