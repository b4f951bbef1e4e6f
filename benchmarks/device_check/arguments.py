"""The command line of the parent."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from .catalogue import SECTIONS, SectionSpec

NOT_GIVEN = "\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for.

    Attributes:
        sections: those that run, in order, with the time boxes that were set.
        left_out: those that do not.
        deadline: seconds after which the run is over.
        device: "cuda" or "cpu".
        dry: tiny sizes, to see that everything runs.
        out: the folder of the result.
        render: results to write the pages from, instead of running anything.
        shows_boxes: print the time boxes, instead of running anything.
    """

    sections: tuple[SectionSpec, ...]
    left_out: tuple[SectionSpec, ...]
    deadline: float
    device: str
    dry: bool
    out: Path
    render: tuple[Path, ...]
    shows_boxes: bool


class OneLine(argparse.ArgumentParser):
    """Says what is wrong in one line; the parser of the package would import torch."""

    def error(self, message: str) -> NoReturn:
        """End the program with "error: " and the message on standard error."""
        self.exit(2, f"error: {message}\n")


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; a wrong one ends the program."""
    parser = _parser()
    given = parser.parse_args(arguments)
    boxes = "" if given.boxes in (None, NOT_GIVEN) else given.boxes
    try:
        known = _with_boxes(boxes)
        only = [_find(name).id for name in _names(given.only)] if given.only else [spec.id for spec in known]
        left_out = {_find(name).id for name in _names(given.skip)}
        deadline = _seconds("--deadline", given.deadline)
    except ValueError as error:
        parser.error(str(error))
    chosen = tuple(spec for spec in known if spec.id in only and spec.id not in left_out)
    if not chosen:
        parser.error("--only and --skip leave no section to run")
    if given.dry and given.device != "cpu":
        parser.error("--dry has sizes that say nothing about a GPU: give --device cpu too, or leave it out")
    if given.device == "cpu" and not given.dry:
        parser.error("--device cpu needs --dry: full sizes would take hours there, and its figures mean nothing")
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"--out {given.out} is no folder")
    return Options(
        sections=chosen,
        left_out=tuple(spec for spec in known if spec not in chosen),
        deadline=deadline,
        device=given.device,
        dry=given.dry,
        out=given.out,
        render=tuple(given.render),
        shows_boxes=given.boxes == NOT_GIVEN,
    )


def _parser() -> OneLine:
    parser = OneLine(
        prog="python -m benchmarks.device_check",
        description="What a GPU has to say, in one command.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("device_check_out"), help="folder of result.json and log.txt")
    parser.add_argument("--only", metavar="S3,S5", default="", help="these sections alone, by id or name")
    parser.add_argument("--skip", metavar="S1", default="", help="all but these")
    parser.add_argument("--deadline", metavar="SECONDS", default="540", help="the run ends by then (540)")
    parser.add_argument(
        "--boxes",
        nargs="?",
        const=NOT_GIVEN,
        metavar="S5=60,S2=30",
        help="set time boxes of sections in seconds; alone, print them all",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --dry")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, to see that every section runs")
    parser.add_argument(
        "--render",
        nargs="+",
        type=Path,
        default=(),
        metavar="FILE",
        help="write docs/hardware.md and README.md from result.json files; of two, the later one's sections count",
    )
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _find(name: str) -> SectionSpec:
    for spec in SECTIONS:
        if name.lower() in (spec.id.lower(), spec.name):
            return spec
    known = [text for spec in SECTIONS for text in (spec.id, spec.name)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}?" if near else "."
    listed = ", ".join(f"{spec.id} {spec.name}" for spec in SECTIONS)
    raise ValueError(f"there is no section {name!r}{hint} There are {listed}")


def _with_boxes(text: str) -> tuple[SectionSpec, ...]:
    boxes = {}
    for item in _names(text):
        name, equals, seconds = item.partition("=")
        if not equals:
            raise ValueError(f"--boxes has {item!r}; give S5=60, or S5=60,S2=30")
        boxes[_find(name.strip()).id] = _seconds(f"--boxes {name.strip()}", seconds)
    return tuple(
        replace(spec, box=boxes[spec.id], least=min(spec.least, boxes[spec.id])) if spec.id in boxes else spec
        for spec in SECTIONS
    )


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{option} is {text!r}; it must be a number of seconds above 0")
    return seconds
