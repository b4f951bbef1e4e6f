"""Runs one process with a time box, and leaves nothing of it behind.

The process leads a session and a process group of its own. It is killed with all of its group when its time is over,
when it has ended by itself (others of the group may go on), and when the parent is interrupted. Who left the group is
known by a variable of the environment that only these processes have.

Output comes through a pipe that a thread empties, and its end is kept: a flood fills neither memory nor disk, and
whoever keeps the pipe open holds nobody up. A process that the kernel does not let go of, as one that waits for a
broken driver, is given up on after some seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MARK = "DSV4_DEVICE_CHECK_RUN"
TAIL = 16_000  # bytes of the output that are kept
LOOK_EVERY = 0.05  # seconds
GIVE_UP_AFTER = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended.

    Attributes:
        rc: its exit code; None if a signal ended it, or nothing could.
        signal: the name of that signal.
        is_over_time: it was killed at the end of its time.
        is_interrupted: it was killed since the parent was interrupted.
        wall_s: how long it ran.
        tail: the end of what it printed.
        left_behind: processes that had left its group and went on.
    """

    rc: int | None
    signal: str | None
    is_over_time: bool
    is_interrupted: bool
    wall_s: float
    tail: str
    left_behind: int


def run_boxed(
    command: Sequence[str],
    *,
    mark: str,
    seconds: float,
    environment: Mapping[str, str],
    folder: Path | None = None,
    own_session: bool = True,
    is_stopped: Callable[[], bool] = lambda: False,
    tick: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command until it ends or its time is over.

    Args:
        command: what to run.
        mark: a text that nobody else's processes have in the variable `MARK`; parts of a run add to that of the run.
        seconds: its time box.
        environment: all of it, but for `MARK`.
        folder: where it runs; None: where this process does.
        own_session: False leaves it in the group of this process, with which it is killed.
        is_stopped: asked now and then: whether to end it before its time.
        tick: is called now and then meanwhile.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=own_session,
        cwd=folder,
        env={**environment, MARK: mark},
    )
    tail = _Tail(process)
    try:
        end = _wait(process.pid, started + seconds, is_stopped, tick)
    finally:
        left_behind = _kill_all(process, mark, own_session)
    code = process.returncode
    return Ended(
        rc=code if code is not None and code >= 0 else None,
        signal=_signal_name(-code) if code is not None and code < 0 else None,
        is_over_time=end == "time",
        is_interrupted=end == "stopped",
        wall_s=time.monotonic() - started,
        tail=tail.text(),
        left_behind=left_behind,
    )


class _Tail:
    """The end of what a process prints."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._file = process.stdout
        self._kept = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while part := os.read(self._file.fileno(), 1 << 16):
            self._kept = (self._kept + part)[-TAIL:]

    def text(self) -> str:
        """What there is of it; who still holds the pipe is not waited for."""
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._file.close()
        return self._kept.decode(errors="replace")


def _wait(
    pid: int, until: float, is_stopped: Callable[[], bool], tick: Callable[[], None]
) -> Literal["ended", "time", "stopped"]:
    """Wait for a process; it is not reaped, so that its id stays its own until its group is killed."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left = until - time.monotonic()
        if left <= 0:
            return "time"
        if is_stopped():
            return "stopped"
        time.sleep(min(LOOK_EVERY, left))
        tick()
    return "ended"


def _kill_all(process: subprocess.Popen[bytes], mark: str, own_session: bool) -> int:
    """Kill a process, its group if it has one, and those that left it; how many had left."""
    group = process.pid if own_session else os.getpgrp()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL) if own_session else process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GIVE_UP_AFTER)
    outside: set[int] = set()
    for _ in range(20):  # those that fork meanwhile are found by the next look
        found = marked_processes(mark)
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                outside |= {pid} if os.getpgid(pid) != group else set()
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY)
    return len(outside)


def marked_processes(mark: str) -> set[int]:
    """The processes that were started with this mark, or one that adds to it, where /proc tells; none that ended."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            if any(word == wanted or word.startswith(wanted + b"/") for word in words):
                found.add(int(folder.name))
    return found - {os.getpid()}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
