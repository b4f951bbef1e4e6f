"""The run: sections one after another, each in a process of its own, and the result written after each.

Imports nothing but the standard library: what a broken torch does to a process must not happen here.
"""

from __future__ import annotations

import datetime
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from .arguments import Options
from .boxed import Ended, run_boxed
from .catalogue import SectionSpec
from .console import closing_text, section_line
from .result import RunFacts, SectionResult, Status, document, skipped, write_result
from .rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
RESERVE = 2.0  # seconds before the deadline in which nothing runs: killing and writing take some
WRITE_EVERY = 5.0
NO_DEVICE = 3  # exit code of a section that finds no device
INTERRUPTED = 130


def run(options: Options, python: Sequence[str] = (sys.executable,)) -> int:
    """Run what was asked for; the exit code is 0 if all sections passed, 130 after an interrupt, and 1 otherwise."""
    with tempfile.TemporaryDirectory(prefix="device_check_") as folder, _interrupts() as is_stopped:
        return _Run(options, Path(folder), python, is_stopped).run()


class _Run:
    """One run and what it has so far."""

    def __init__(self, options: Options, folder: Path, python: Sequence[str], is_stopped: Callable[[], bool]) -> None:
        self._options = options
        self._folder = folder
        self._python = python
        self._is_stopped = is_stopped
        self._ends = time.monotonic() + options.deadline
        self._mark = secrets.token_hex(8)
        self._facts = RunFacts(
            commit=commit(ROOT),
            started=f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
            device=options.device,
            dry=options.dry,
            deadline_s=options.deadline,
        )
        self._done: list[SectionResult] = []
        self._stops: str | None = None  # why no further section is started

    def run(self) -> int:
        """All sections."""
        self._options.out.mkdir(parents=True, exist_ok=True)
        keep_older(self._options.out / "result.json")
        for spec in self._options.sections:
            result = self._run_section(spec)
            self._done.append(result)
            self._log(result)
            self._write("running")
            print(section_line(result), flush=True)
        self._write("interrupted" if self._is_stopped() else "ended")
        print(closing_text(document(self._facts, self._done, "ended"), self._options.out), flush=True)
        if self._is_stopped():
            return INTERRUPTED
        return 0 if all(result.status == "passed" for result in self._done) else 1

    def _run_section(self, spec: SectionSpec) -> SectionResult:
        left = self._ends - RESERVE - time.monotonic()
        if self._is_stopped():
            return skipped(spec, "the run was interrupted")
        if self._stops is not None:
            return skipped(spec, self._stops)
        if left < spec.least:
            return skipped(spec, f"{max(left, 0):.0f} s are left before the deadline, and it needs {spec.least:.0f}")
        box, rows = min(spec.box, left), self._folder / f"{spec.id}.jsonl"
        print(f"{spec.id} {spec.name}: at most {box:.0f} s", file=sys.stderr, flush=True)
        ended = run_boxed(
            self._command(spec, rows, box),
            mark=f"{self._mark}-{spec.id}",
            seconds=box,
            environment=child_environment(os.environ, dry=self._options.dry),
            folder=ROOT,
            is_stopped=self._is_stopped,
            tick=self._writer(spec, rows, box),
        )
        if ended.rc == NO_DEVICE:
            self._stops = "no GPU"
        is_cut = box < spec.box
        return _section_result(spec, box, ended, rows, "deadline" if is_cut else "time box")

    def _command(self, spec: SectionSpec, rows: Path, box: float) -> list[str]:
        command = [*self._python, "-m", "benchmarks.device_check.child", spec.entry]
        command += ["--rows", str(rows), "--device", self._options.device, "--box", str(box)]
        return [*command, "--out", str(self._options.out.resolve()), *(("--dry",) if self._options.dry else ())]

    def _writer(self, spec: SectionSpec, rows: Path, box: float) -> Callable[[], None]:
        """Writes the rows of a section while it runs, every few seconds: this process may be killed as well."""
        started = last = time.monotonic()

        def tick() -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= WRITE_EVERY:
                last = now
                read = read_rows(rows)
                so_far = SectionResult(
                    id=spec.id, name=spec.name, status="running", box_s=box, wall_s=now - started, read=read
                )
                self._write("running", so_far)

        return tick

    def _write(self, state: str, *more: SectionResult) -> None:
        known = {result.id for result in (*self._done, *more)}
        waiting = [skipped(spec, "not started yet") for spec in self._options.sections if spec.id not in known]
        left_out = [skipped(spec, "not asked for") for spec in self._options.left_out]
        sections = sorted((*self._done, *more, *waiting, *left_out), key=lambda result: int(result.id[1:]))
        write_result(self._options.out / "result.json", document(self._facts, sections, state))

    def _log(self, result: SectionResult) -> None:
        with (self._options.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"==== {section_line(result)}\n")
            for row in result.rows:
                if row.error is not None:
                    file.write(f"---- {dict(row.case)}\n{row.error.get('traceback', '')}\n")
            if result.error is not None:
                file.write(f"{result.error.get('tail', '')}\n")


def _section_result(spec: SectionSpec, box: float, ended: Ended, rows: Path, limit: str) -> SectionResult:
    read = read_rows(rows)
    status, error = _judge(ended, limit, is_clean=bool(read.rows) and not any(row.is_bad for row in read.rows))
    if status == "passed" and (read.broken or ended.left_behind):
        status = "partial"
    return SectionResult(
        id=spec.id,
        name=spec.name,
        status=status,
        box_s=box,
        wall_s=ended.wall_s,
        rc=ended.rc,
        signal=ended.signal,
        read=read,
        error=error,
        left_behind=ended.left_behind,
    )


def _judge(ended: Ended, limit: str, *, is_clean: bool) -> tuple[Status, Mapping[str, str] | None]:
    """The status of a section that has ended, and what there is to say of its end."""
    status: Status
    if ended.is_interrupted:
        status, kind, message = "interrupted", "interrupted", "the run was interrupted"
    elif ended.is_over_time:
        status, kind, message = "timeout", "timeout", f"killed at the end of its {limit} after {ended.wall_s:.0f} s"
    elif ended.signal is not None:
        status, kind, message = "failed", "signal", f"ended by {ended.signal}"
    elif ended.rc == NO_DEVICE:
        status, kind, message = "failed", "no device", "no GPU: torch finds no CUDA device"
    elif ended.rc != 0:
        status, kind, message = "failed", "exit", f"ended with exit code {ended.rc}"
    else:
        return ("passed" if is_clean else "partial"), None
    return status, {"type": kind, "message": message, "tail": ended.tail}


@dataclass(slots=True)
class _Stop:
    """Whether somebody wants the run to end."""

    asked: bool = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of signals: the first one ends the section that runs, a second one the program."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Signals that would end the program are noted instead, so that the result is written."""
    stop = _Stop()
    before = {number: signal.signal(number, stop.note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield lambda: stop.asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def child_environment(environment: Mapping[str, str], *, dry: bool) -> dict[str, str]:
    """What sections find: this checkout on the path, one folder for compilers to keep what they made, few threads."""
    kept = {
        name: value for name, value in environment.items() if name not in ("CUDA_LAUNCH_BLOCKING", "PYTHONSAFEPATH")
    }
    path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    caches = Path(tempfile.gettempdir(), f"device_check_caches_{os.getuid()}")
    caches.mkdir(mode=0o700, exist_ok=True)
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1" if dry else "4",
    }


def keep_older(path: Path) -> None:
    """Put the result of an earlier run in the same folder out of the way: it took somebody's minutes."""
    if path.exists():
        number = 1
        while (older := path.with_name(f"result.{number}.json")).exists():
            number += 1
        path.rename(older)


def commit(folder: Path) -> str:
    """The commit of a checkout, with a plus sign if something was changed since; "unknown" without git."""
    if shutil.which("git") is None:
        return "unknown"

    def git(*words: str) -> str | None:
        done = subprocess.run(
            ["git", *words], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return f"{head}+" if git("status", "--porcelain", "--untracked-files=no") else head
