"""The process of a section, or of a part of one: `python -m benchmarks.device_check.child MODULE:FUNCTION ...`.

What the function raises becomes a row. The stacks of all threads are printed before the time is over, so that a hang
can be read; and the process ends at once when it is done, since what a library does at exit may hang too.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .bench import Bench, DeviceLostError
from .parent import NO_DEVICE
from .smi import CLOCKS, ask_smi

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one function; 0 if it came to its end, whatever its rows say."""
    bench, entry = _parse(arguments)
    _die_with_the_parent()
    faulthandler.enable()
    if bench.remaining() > 4:
        faulthandler.dump_traceback_later(bench.remaining() - 1.5)
    if bench.device == "cuda" and not _has_device():
        return NO_DEVICE
    module, _, function = entry.partition(":")
    is_section = function == "run"
    try:
        with bench.attempt(entry=entry) as attempt:
            _note_clocks(bench, "before", is_section)
            getattr(importlib.import_module(module), function)(bench)
            _note_clocks(bench, "after", is_section)
    except DeviceLostError:
        return 1
    return int(attempt.failed)


def _note_clocks(bench: Bench, when: str, is_section: bool) -> None:
    """Clocks, heat and power around a section: a figure of a throttled GPU is another figure."""
    if bench.device == "cuda" and is_section:
        for query, answer in ask_smi(CLOCKS).items():
            bench.row("clocks", answer, query=query, when=when)


def _parse(arguments: Sequence[str] | None) -> tuple[Bench, str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("entry")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--box", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args(arguments)
    bench = Bench(device=given.device, dry=given.dry, rows=given.rows, out=given.out, ends=time.monotonic() + given.box)
    return bench, given.entry


def _die_with_the_parent() -> None:
    """Where Linux is asked to: a parent that was killed cannot end this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
