"""S3: what a review of the cuda engine was afraid of, each case in a process of its own.

An illegal address, or a generator that takes itself to be recorded for good, must not reach the next case. On the CPU,
where a dry run only shows that the cases run, streams are nothing and sleeping is left out.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ..bench import Bench
from . import hazard_cases, hazard_memory

AT_ONCE = 4  # processes; each takes seconds to start, and some cores to do it
EACH_S = 25.0
CASES = {**hazard_cases.CASES, **hazard_memory.CASES}


def run(bench: Bench) -> None:
    """All cases; several at a time, since nothing is timed. A dry run has them in this process."""
    if bench.dry:
        for case in CASES.values():
            case.run(bench)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda name: _in_process(bench, name), CASES))


def _in_process(bench: Bench, name: str) -> None:
    case = CASES[name]
    if not bench.in_process(f"{case.run.__module__}:{case.run.__name__}", EACH_S, id=name, what=case.what):
        bench.row("hazard", "the process failed", expected="right", id=name, what=case.what)
