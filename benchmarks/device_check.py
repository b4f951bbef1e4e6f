"""What a GPU has to say, in one script of some minutes: contract tests, then launches, times and memory.

    python -m benchmarks.device_check

Without a CUDA device it says "no GPU" and stops. What it printed, on which device and when, is kept in
docs/hardware.md.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from dsv4_compile.inspect.arguments import OneLineParser

from .machine import describe
from .sections import Setting

ROOT = Path(__file__).parent.parent
BENCHMARKS = ("dispatch", "streams", "region", "ttft", "memory")


def run_contract_tests() -> bool:
    """The tests that need a GPU: the engine's rules, the same ones that the host engine keeps."""
    # this file alone: collecting all tests takes long, and libraries that a machine with a GPU may not have
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/runtime/engines/cuda/test_engine.py"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def run_benchmark(name: str, setting: Setting) -> bool:
    """Print what a benchmark found, or where it failed: the ones after it still have something to say."""
    torch._dynamo.reset()  # what the benchmark before captured would count as memory of this one
    gc.collect()
    torch.cuda.empty_cache()
    try:
        print(import_module(f"benchmarks.{name}").run(setting), end="\n\n", flush=True)
    except Exception:
        print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; the exit code is 1 if a contract test or a benchmark failed."""
    OneLineParser(description=__doc__).parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU")
        return 0
    started = os.getloadavg()
    passed = run_contract_tests()
    print(f"contract tests: {'passed' if passed else 'FAILED'}\n", flush=True)
    ran = [run_benchmark(name, Setting(device="cuda")) for name in BENCHMARKS]
    print(describe(started))
    return 0 if passed and all(ran) else 1


if __name__ == "__main__":
    raise SystemExit(main())
