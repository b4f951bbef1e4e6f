"""What the compiler made of a layer, as files: every stage of the graph, every unit, the plan and the programs.

    python examples/inspect_partition.py [FOLDER]
    python examples/inspect_partition.py --svg FILE

The second draws the layer before and after, under each runner; `docs/c4a_layer.svg` was made so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _layer import layer_and_inputs
from _picture import draw_plans

import dsv4_compile
from dsv4_compile.errors import OptionError
from dsv4_compile.inspect.arguments import OneLineParser
from dsv4_compile.inspect.plan import Plan

COLUMNS = {
    "After: old runner, wide": ("mrv1", "wide"),
    "After: old runner, minimal": ("mrv1", "minimal"),
    "After: new runner, narrow": ("mrv2", "narrow"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Dump into a folder, list what is there, and show the program of the captured batch size; or draw."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="default: one that is removed at the end")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the layer into this file instead")
    options = parser.parse_args(arguments)
    if options.svg is not None and options.folder is not None:
        parser.error("FOLDER and --svg are two commands; give one of them")
    if options.svg is not None:
        try:
            options.svg.write_text(picture(), encoding="utf-8")
        except OSError as error:
            parser.error(f"cannot write {str(options.svg)!r}: {error.strerror}")
        print(f"wrote {options.svg}")
    elif options.folder is not None:
        try:
            inspect(options.folder)
        except OptionError as error:
            parser.error(str(error).partition("\n")[0])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            inspect(Path(temporary))


def picture() -> str:
    """A C4A layer without a compiler, and under each pair of runner and region, as SVG."""
    plans = layer_plans()
    before = next(plan for plan in plans.values() if plan.region == "wide")
    return draw_plans("One C4A attention layer of DeepSeek V4, before and after dsv4_piecewise", before, plans)


def layer_plans() -> dict[str, Plan]:
    """The plans of a C4A layer, by the heading of their column."""
    layer, args = layer_and_inputs(num_tokens=8)
    return {
        heading: dsv4_compile.explain(layer, *args, options={"runner": runner, "region": region})
        for heading, (runner, region) in COLUMNS.items()
    }


def inspect(folder: Path) -> None:
    """Compile with `dump_dir`, call twice so that a program is captured, and print."""
    layer, args = layer_and_inputs(num_tokens=8)
    options: dict[str, Any] = {"runner": "mrv2", "dump_dir": str(folder)}
    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=options)
    with torch.no_grad():
        for _ in range(2):
            compiled(*args)
    newest = max(folder.glob("graph_*"), key=lambda path: int(path.name.removeprefix("graph_")))
    for file in sorted(newest.iterdir()):
        print(f"{file.relative_to(folder)}  {first_line(file)}")
    print(f"\nprogram of batches of 8 tokens:\n{(newest / 'program_8.py').read_text()}")


def first_line(file: Path) -> str:
    """What a stage says of itself: its name and how many nodes it added or took away."""
    line = file.read_text().partition("\n")[0]
    return line if line.startswith("#") else ""


if __name__ == "__main__":
    main()
