"""What a GPU has to say, in one script of under five minutes: contract tests, then launches, times and memory.

    python -m benchmarks.device_check

Without a CUDA device it says "no GPU" and stops. What it printed, on which device and when, is kept in
docs/hardware.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dsv4_compile.inspect.one_line_parser import OneLineParser

from . import dispatch, lanes, memory, region, ttft
from .machine import describe
from .sections import Setting

ROOT = Path(__file__).parent.parent


def run_contract_tests() -> bool:
    """The tests that need a GPU: the engine's rules, the same ones that the host engine keeps."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; the exit code is 1 if a contract test failed."""
    OneLineParser(description=__doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU")
        return 0
    started = os.getloadavg()
    passed = run_contract_tests()
    print(f"contract tests: {'passed' if passed else 'FAILED'}\n")
    for benchmark in (dispatch, lanes, region, ttft, memory):
        print(benchmark.run(Setting(device="cuda")), end="\n\n", flush=True)
    print(describe(started))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
