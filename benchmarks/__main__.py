"""The one runner of the benchmarks.

    python -m benchmarks                             all of them, some minutes
    python -m benchmarks dispatch memory --quick     two of them, in sizes that take seconds
    python -m benchmarks --write docs/benchmarks.md  all of them, and the page says what they found

A page keeps what was written by hand: only what stands between its two marks is replaced.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dsv4_compile.inspect.arguments import OneLineParser

from . import compile_time, dispatch, import_time, memory, plan_time, region, ttft
from .machine import describe
from .sections import Section, Setting

BENCHMARKS: dict[str, Callable[[Setting], Section]] = {
    "dispatch": dispatch.run,
    "region": region.run,
    "ttft": ttft.run,
    "memory": memory.run,
    "compile_time": compile_time.run,
    "plan_time": plan_time.run,
    "import_time": import_time.run,
}
BEGIN = "<!-- begin: written by python -m benchmarks, not by hand -->"
END = "<!-- end -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print it, and write it where it is wanted."""
    options = parse(arguments)
    torch.set_num_threads(1)  # the tensors are so small that more threads only wait for each other
    started = os.getloadavg()
    setting = Setting(quick=options.quick, vllm_python=options.vllm_python)
    texts = []
    for name in options.names or BENCHMARKS:
        begun = time.perf_counter()
        texts.append(f"{BENCHMARKS[name](setting)}\n\nAgain: `python -m benchmarks {name}`")
        print(texts[-1], end="\n\n", flush=True)
        print(f"{name} took {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    machine = str(describe(started))
    print(machine)
    if options.write:
        replace_between_marks(options.write, "\n\n".join((machine, *texts)))
    return 0


def replace_between_marks(page: Path, text: str, mark: str = BEGIN) -> None:
    """Put a text between the two marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(mark)
    _, end, after = rest.partition(END)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong one ends the program."""
    parser = OneLineParser(prog="python -m benchmarks", description="Run the benchmarks, one after another.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="shrunk sizes; the figures mean nothing")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the results of all between the marks of a page")
    parser.add_argument("--vllm-python", type=Path, metavar="PYTHON", help="a Python with vLLM, to compare in dispatch")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if options.write and (options.names or options.quick):
        parser.error("--write needs all benchmarks in full size: leave out names and --quick")
    if options.write and (problem := why_not_written(options.write)):
        parser.error(problem)
    if options.vllm_python and not options.vllm_python.is_file():
        parser.error(f"there is no {str(options.vllm_python)!r}: give the Python of an environment that has vLLM")
    return options


def why_not_written(page: Path) -> str | None:
    """Why a page cannot take the results, asked before they take minutes to make."""
    if not page.is_file():
        return f"there is no {str(page)!r}: give a page that has the two marks, as docs/benchmarks.md"
    text = page.read_text(encoding="utf-8")
    return None if BEGIN in text and END in text else f"{page.name} needs the lines {BEGIN!r} and {END!r}"


if __name__ == "__main__":
    sys.exit(main())
