"""The command; see the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .arguments import parse
from .catalogue import SECTIONS
from .parent import run
from .render import render


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, render, or show the time boxes."""
    options = parse(arguments)
    if options.render:
        return render(options.render)
    if options.shows_boxes:
        for spec in SECTIONS:
            print(f"{spec.id:<4} {spec.name:<9} {spec.box:>4.0f} s, needs {spec.least:>2.0f}  {spec.about}")
        print(f"{'all':<14} {sum(spec.box for spec in SECTIONS):>4.0f} s; the deadline ends the run before that")
        return 0
    try:
        return run(options)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
