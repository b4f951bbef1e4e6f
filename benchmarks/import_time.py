"""How much longer `import dsv4_compile` takes than `import torch` alone: medians over subprocesses, and their ratio.

The two are measured in turn, so that a slow moment of the machine meets both. The bar is a ratio under 1.3.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from .sections import Section, Setting, Table

_CODE = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
INTRO = "Each in a fresh interpreter, medians of {runs} (aim: at most 1.3 times torch alone)."


def seconds_to_import(module: str) -> float:
    """Seconds that one import takes in a fresh interpreter."""
    command = [sys.executable, "-c", _CODE.format(module=module)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def run(setting: Setting) -> Section:
    """Import both, again and again."""
    runs = 1 if setting.quick else 5
    times: dict[str, list[float]] = {"torch": [], "dsv4_compile": []}
    for module in times:  # one of each before, so that both find warm files
        seconds_to_import(module)
    for _ in range(runs):
        for module, seconds in times.items():
            seconds.append(seconds_to_import(module))
    medians = {module: statistics.median(seconds) for module, seconds in times.items()}
    rows = tuple(
        (f"import {module}", f"{seconds:.2f}", f"{seconds / medians['torch']:.2f}")
        for module, seconds in medians.items()
    )
    parts = (INTRO.format(runs=runs), Table(("", "seconds", "of torch"), rows))
    return Section(title="Import", parts=parts)
