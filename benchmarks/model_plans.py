"""What the released models will take, for the docs.

    python -m benchmarks.model_plans                          Flash and Pro, printed; a minute
    python -m benchmarks.model_plans --write docs/planning.md  and the page has it between its marks

The text is that of `python -m dsv4_compile plan`, and its estimates are those of the machine that wrote it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dsv4_compile.config import Config
from dsv4_compile.inspect.arguments import OneLineParser
from dsv4_compile.plan_model.command import RELEASED, TOKENS, memory_size, read_model, token_counts
from dsv4_compile.plan_model.figures import ModelPlan
from dsv4_compile.plan_model.make import Question, plan_model
from dsv4_compile.plan_model.show import plan_text

from .__main__ import END, replace_between_marks
from .machine import describe

BEGIN = "<!-- begin: written by python -m benchmarks.model_plans, not by hand -->"
GPU_MEMORY, REQUESTS, LAUNCH_US = "141GB", 16, 4.0


def question_for(model: str) -> Question:
    """What the docs ask of a released model: its default plan under mrv2, with weights in fp8."""
    return Question(
        model=model,
        config=read_model(model),
        tokens=token_counts(TOKENS),
        options=Config(runner="mrv2", piece_compiler="eager"),
        dtype=torch.bfloat16,
        weights_dtype=torch.float8_e4m3fn,
        parameters=None,
        requests=REQUESTS,
        gpu_memory=memory_size(GPU_MEMORY),
        launch_us=LAUNCH_US,
    )


def section(plan: ModelPlan) -> str:
    """A model's part of the page."""
    return f"### {plan.model.capitalize()}\n\n{plan_text(plan, heading='#### ' + plan.model.capitalize() + ': ')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan both, print them, and write them where they are wanted."""
    options = _parse(arguments)
    started = os.getloadavg()
    sections = [section(plan_model(question_for(model))) for model in RELEASED]
    text = "\n\n".join([str(describe(started)), *sections])
    print(text)
    if options.write:
        replace_between_marks(options.write, text, BEGIN)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m benchmarks.model_plans", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the text between the marks of a page")
    options = parser.parse_args(arguments)
    if options.write and not _has_marks(options.write):
        parser.error(f"{str(options.write)!r} is no page with the lines {BEGIN!r} and {END!r}")
    return options


def _has_marks(page: Path) -> bool:
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    return BEGIN in text and END in text


if __name__ == "__main__":
    sys.exit(main())
