"""S1: the tests of the engine's contract, by pytest with what plug-ins there are; and, beside them, full caches.

The settings of the project name plug-ins that a machine may lack, so pytest is given settings of its own. Where there
is no pytest, the examples of the contract run as they are: they are plain functions of an engine. Nothing is timed
here, so a process beside the tests compiles what later sections will, and they find it in the caches on disk.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch

from ..bench import Bench
from ..parent import ROOT

TESTS = {"cuda": "tests/runtime/engines/cuda/test_engine.py", "cpu": "tests/runtime/engines/host/test_engine.py"}
SUPPORT = (ROOT / "tests" / "support", ROOT / "examples")
MODULES = ("engine_examples", "engine_surroundings", "engine_streams")
FILLERS = tuple(f"benchmarks.device_check.sections.{name}:fill_caches" for name in ("correct", "decode", "streams"))
SETTINGS = """
[pytest]
addopts = -ra --import-mode=importlib
pythonpath = {paths}
markers =
    gpu: needs a CUDA device
    inductor: compiles with Inductor
    exhaustive: left out of a usual run
    sampled(k): each k-th case runs in a usual run
"""


def run(bench: Bench) -> None:
    """Tests in this thread, caches in another one."""
    filling = threading.Thread(target=_fill_caches, args=(bench,))
    if bench.device == "cuda":
        filling.start()
    if find_spec("pytest") is None:
        bench.row("fact", "no pytest: the examples run without it", name="contract")
        run_examples(bench)
    else:
        run_pytest(bench)
    if filling.is_alive():
        filling.join(max(bench.remaining() - 3, 0))


def run_pytest(bench: Bench) -> None:
    """The tests that need a GPU; in a dry run a few of those of the host engine."""
    with tempfile.TemporaryDirectory() as folder:
        settings, report = Path(folder, "pytest.ini"), Path(folder, "report.xml")
        settings.write_text(SETTINGS.format(paths=" ".join(map(str, SUPPORT))), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--rootdir", str(ROOT)]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", str(ROOT / TESTS[bench.device])]
        command += ["-k", "test_rule and (replay or stream)"] if bench.dry else ["-m", "gpu"]
        if find_spec("pytest_timeout") is not None:
            command += ["--timeout", "40", "--timeout-method", "thread"]
        if find_spec("xdist") is not None and not bench.dry:
            command += ["-n", "4"]
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=max(bench.remaining() - 4, 1), check=False
            )
            bench.row("fact", done.returncode, name="exit code of pytest")
        except subprocess.TimeoutExpired:
            bench.row("outcome", "over its time", expected="passed", test="pytest")
        read_report(bench, report)


def read_report(bench: Bench, report: Path) -> None:
    """A row for each test that did not pass, and one for each outcome."""
    if not report.is_file():
        bench.row("outcome", "no report: see the log", expected="passed", test="pytest")
        return
    outcomes: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        outcomes[outcome] += 1
        if outcome != "passed":
            detail = next((child.get("message") or child.text or "" for child in case if child.tag == outcome), "")
            name = f"{case.get('name')}"
            bench.row("outcome", f"{outcome}: {detail}", ok=None if outcome == "skipped" else False, test=name)
    for outcome, count in sorted(outcomes.items()):
        bench.row("count", count, outcome=outcome)
    if not outcomes["passed"]:
        bench.row("outcome", "none passed", expected="some", test="pytest")


def run_examples(bench: Bench) -> None:
    """Each example of the contract on the engine of the device."""
    from dsv4_compile.runtime.engines.select import engine_for

    sys.path[:0] = map(str, SUPPORT)
    engine, passed = engine_for("auto", torch.device(bench.device)), 0
    for module in MODULES:
        with bench.attempt(test=module):
            for name, example in importlib.import_module(module).EXAMPLES.items():
                with bench.attempt(test=name) as attempt:
                    example(engine)
                passed += not attempt.failed
    bench.row("count", passed, outcome="passed")


def _fill_caches(bench: Bench) -> None:
    for filler in FILLERS:
        bench.in_process(filler, bench.remaining() - 5)
