"""How much longer `import dsv4_compile` takes than `import torch` alone: medians over subprocesses, and their ratio.

The two are measured in turn, so that a slow moment of the machine meets both. The bar is a ratio under 1.3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

_CODE = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def seconds_to_import(module: str) -> float:
    """Seconds that one import takes in a fresh interpreter."""
    command = [sys.executable, "-c", _CODE.format(module=module)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="interpreters started for each of the two")
    runs = parser.parse_args().runs
    # one of each before, so that both find warm files
    times: dict[str, list[float]] = {"torch": [], "dsv4_compile": []}
    for module in times:
        seconds_to_import(module)
    for _ in range(runs):
        for module, seconds in times.items():
            seconds.append(seconds_to_import(module))
    medians = {module: statistics.median(seconds) for module, seconds in times.items()}
    ratio = medians["dsv4_compile"] / medians["torch"]
    print(json.dumps({"seconds": medians, "ratio": round(ratio, 3), "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
