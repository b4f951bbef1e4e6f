"""What the compiler made of a layer, as files: every stage of the graph, every unit, the plan and the programs.

python examples/inspect_partition.py [FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _layer import layer_and_inputs


def main(arguments: Sequence[str] | None = None) -> None:
    """Dump into a folder, list what is there, and show the program of the captured batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="default: one that is removed at the end")
    folder = parser.parse_args(arguments).folder
    if folder is not None:
        inspect(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        inspect(Path(temporary))


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
