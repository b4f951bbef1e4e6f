"""A sweep over torch's own database of operators: each in a program, compiled beside eager.

    python -m benchmarks.opinfo                                        every operator: hours
    python -m benchmarks.opinfo --dtypes float32 --samples 1 --jobs 2  one sample each, in one dtype
    python -m benchmarks.opinfo 'linalg.*' max_pool2d                  the operators whose names match

`opinfo_program.py` has the program. Outputs, strides, offsets, lazy bits, aliasing, identity and written inputs have to
be those of eager. Each operator runs in a process of its own, so that a crash or a hang is one finding. Findings that
`torch.compile(backend="eager")` has as well, and those listed in `opinfo_known.py` with a reason, are printed and not
counted.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing.connection
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from dsv4_compile.inspect.arguments import OneLineParser

from .opinfo_known import KNOWN, LEFT_OUT
from .opinfo_program import Finding, findings, name_of

DTYPES = ("float32", "int64", "complex64", "bool")
_PATIENCE = 5.0  # on a busy machine a process may take so many times its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to run.

    Attributes:
        dtypes: names of dtypes; an operator runs in those it supports.
        samples: how many of each operator's samples.
        seconds: limit for an operator in one dtype, of the time of a processor.
        jobs: processes at a time.
    """

    dtypes: tuple[str, ...] = DTYPES
    samples: int = 2
    seconds: float = 120.0
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One operator in one dtype."""

    op: Any
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """For findings."""
        return f"{name_of(self.op)} {self.dtype}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, and print what was found; 1 if something is new."""
    options = parse(arguments)
    dtypes = tuple(options.dtypes.split(","))
    sweep = Sweep(dtypes=dtypes, samples=options.samples, seconds=options.seconds, jobs=options.jobs)
    torch.set_num_threads(1)  # a process that forks must not have started any other thread
    begun, new, known, count = time.perf_counter(), 0, 0, 0
    jobs = list(jobs_of(options.names, sweep))
    for job in jobs_of(["mul"], Sweep(dtypes=("float32",))):
        list(findings(job.op, job.dtype, 1))  # what every process would do first: import, and compile something
    for job, found in run(jobs, sweep):
        count += 1
        print(f"{count} of {len(jobs)}: {job.name}", file=sys.stderr, flush=True)
        for finding in found:
            reason = why_known(job, finding)
            new, known = new + (reason is None), known + (reason is not None)
            print(
                f"{'NEW' if reason is None else 'known'} {finding}"[:600], f"({reason})" if reason else "", flush=True
            )
    seconds = time.perf_counter() - begun
    print(f"{count} operators and dtypes in {seconds:.0f} s: {new} new findings, {known} known")
    return int(new > 0)


def jobs_of(patterns: Sequence[str], sweep: Sweep) -> Iterator[Job]:
    """Operators whose names match one of the patterns, all if there are none, each in its dtypes."""
    for op in op_db:
        names = (name_of(op), str(op.name))
        if name_of(op) in LEFT_OUT or not any(
            fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns or ["*"]
        ):
            continue
        supported = op.supported_dtypes("cpu")
        for dtype in (getattr(torch, name) for name in sweep.dtypes):
            if dtype in supported:
                yield Job(op, dtype)


def why_known(job: Job, finding: Finding) -> str | None:
    """Why a finding is none, or None."""
    if finding.by_torch:
        return "torch.compile itself"
    return KNOWN.get(name_of(job.op))


def run(jobs: Sequence[Job], sweep: Sweep) -> Iterator[tuple[Job, list[Finding]]]:
    """Run every job in a process of its own, some at a time; in the order in which they end."""
    waiting: list[Job] = list(reversed(jobs))
    running: list[_Process] = []
    while waiting or running:
        while waiting and len(running) < sweep.jobs:
            running.append(_Process(waiting.pop(), sweep))
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=0.1)
        for process in [process for process in running if process.is_over()]:
            running.remove(process)
            yield process.job, process.findings()


class _Process:
    """A job that runs."""

    def __init__(self, job: Job, sweep: Sweep) -> None:
        context = multiprocessing.get_context("fork")  # torch is imported already
        self.job = job
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_job, args=(job, sweep, sender))
        self._deadline = time.monotonic() + _PATIENCE * max(sweep.seconds, 1.0)
        self._found: list[Finding] = []
        self._process.start()
        sender.close()
        self.sentinel = self._process.sentinel

    def is_over(self) -> bool:
        """Whether it has ended, or is ended now for having taken too long."""
        self._receive()
        if self._process.is_alive() and time.monotonic() > self._deadline:
            self._process.kill()
            self._process.join()
        return not self._process.is_alive()

    def _receive(self) -> None:
        try:
            while self._receiver.poll():
                self._found.append(self._receiver.recv())
        except EOFError:
            pass

    def findings(self) -> list[Finding]:
        """What it has found, its own end included."""
        self._receive()
        self._process.join()
        if self._process.exitcode:
            self._found.append(Finding(self.job.name, 0, f"the process ended with {self._process.exitcode}", False))
        return self._found


def _run_job(job: Job, sweep: Sweep, sender: Connection) -> None:
    signal.signal(signal.SIGPROF, _raise_timeout)
    signal.setitimer(signal.ITIMER_PROF, sweep.seconds)
    try:
        for finding in findings(job.op, job.dtype, sweep.samples):
            sender.send(finding)
    except TimeoutError as error:
        sender.send(Finding(job.name, 0, str(error), False))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sender.close()


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError("took longer than its limit")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong one ends the program."""
    parser = OneLineParser(prog="python -m benchmarks.opinfo", description="Compare operators with eager.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="patterns of operator names; default: all")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated; default: %(default)s")
    parser.add_argument("--samples", type=int, default=2, help="of each operator; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of an operator; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; default: %(default)s")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.dtypes.split(",") if not isinstance(getattr(torch, name, None), torch.dtype)]
    if unknown:
        parser.error(f"torch has no dtype {unknown[0]!r}")
    return options


if __name__ == "__main__":
    sys.exit(main())
