"""Sections of the device check that do what sections must not; each writes a row first. Nothing here imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.device_check.bench import Bench


def measures(bench: Bench) -> None:
    bench.row("wall_us", 1.5, spread=(1.0, 2.0), n=30, config="eager")


def has_an_error_row(bench: Bench) -> None:
    measures(bench)
    with bench.attempt(config="broken"):
        raise ValueError("on purpose")
    bench.row("wall_us", float("nan"), config="after the error")


def is_not_as_expected(bench: Bench) -> None:
    bench.row("count", 1, expected=2)


def measures_nothing(bench: Bench) -> None:
    """Ends well, without a row."""


def raises(bench: Bench) -> None:
    measures(bench)
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def exits(bench: Bench) -> None:
    measures(bench)
    sys.exit(5)


def hangs(bench: Bench) -> None:
    measures(bench)
    time.sleep(600)


def dies_of(number: signal.Signals, bench: Bench) -> None:
    measures(bench)
    os.kill(os.getpid(), number)
    time.sleep(600)


def is_killed(bench: Bench) -> None:
    dies_of(signal.SIGKILL, bench)


def reads_nowhere(bench: Bench) -> None:
    dies_of(signal.SIGSEGV, bench)


def writes_half_a_line(bench: Bench) -> None:
    measures(bench)
    with bench.rows.open("a", encoding="utf-8") as file:
        file.write('{"metric": "wall_us", "val')
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def writes_rubbish(bench: Bench) -> None:
    measures(bench)
    with bench.rows.open("ab") as file:
        file.write(b'\xff\xfe\n[1, 2]\n{"metric": 3}\n' + b"[" * 100_000 + b"\n")
    measures(bench)


def floods(bench: Bench) -> None:
    measures(bench)
    for _ in range(2_000):
        print("x" * 20_000)
    print("the end of it")
    sys.exit(1)


def leaves_somebody_behind(bench: Bench) -> None:
    """One in the group of this process, one in a session of its own; both hold its output open."""
    pids = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=is_own).pid
        for is_own in (False, True)
    ]
    bench.row("pids", " ".join(map(str, pids)))


def runs_parts(bench: Bench) -> None:
    """Parts in processes of their own: their rows join those of this one, also of those that end badly."""
    here = __name__
    for name in ("measures", "is_killed", "exits"):
        bench.row("ended_well", bench.in_process(f"{here}:{name}", 30, part=name), part=name)
    bench.row("ended_well", bench.in_process(f"{here}:hangs", 1.5, part="hangs"), part="hangs")
    bench.row(
        "ended_well", bench.in_process(f"{here}:measures", 30, prefix=("no such tool",), part="tool"), part="tool"
    )
