"""What a section is given: where to run, how long, and where its rows go. Imports torch only when there is a device."""

from __future__ import annotations

import importlib
import os
import secrets
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .boxed import MARK, run_boxed
from .rows import Row, Value, append_row

T = TypeVar("T")


class DeviceLostError(Exception):
    """The device answers no more, so nothing that this process still does on it means anything."""


@dataclass(slots=True)
class Attempt:
    """Whether a block under `Bench.attempt` failed."""

    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """See the module docstring.

    Attributes:
        device: "cuda" or "cpu".
        dry: tiny sizes and few repetitions; the figures mean nothing.
        rows: the file of rows.
        out: the folder of the result.
        ends: `time.monotonic()` at the end of the time box.
    """

    device: str
    dry: bool
    rows: Path
    out: Path
    ends: float

    def row(
        self,
        metric: str,
        value: Value,
        *,
        spread: tuple[float, float] | None = None,
        n: int = 1,
        expected: Value = None,
        ok: bool | None = None,
        **case: Value,
    ) -> None:
        """Write a row now; where something is expected and nothing is judged, equal is right."""
        if ok is None and expected is not None:
            ok = value == expected
        append_row(self.rows, Row(metric=metric, value=value, case=case, spread=spread, n=n, expected=expected, ok=ok))

    def pick(self, full: T, dry: T) -> T:
        """The size for this run."""
        return dry if self.dry else full

    def remaining(self) -> float:
        """Seconds that are left of the time box."""
        return self.ends - time.monotonic()

    @contextmanager
    def attempt(self, **case: Value) -> Iterator[Attempt]:
        """A block whose error becomes a row, and is gone.

        Raises:
            DeviceLostError: after an error the device does not answer.
        """
        attempt = Attempt()
        try:
            yield attempt
        except DeviceLostError:
            raise
        except Exception as error:
            attempt.failed = True
            self._note(error, case)
            self._ask_device(case)

    def _note(self, error: Exception, case: dict[str, Value]) -> None:
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        said = {"type": type(error).__name__, "message": str(error), "traceback": text}
        append_row(self.rows, Row(metric="error", value=None, case=case, error=said))

    def _ask_device(self, case: dict[str, Value]) -> None:
        if self.device != "cuda":
            return
        import torch

        try:
            torch.cuda.synchronize()
        except Exception as error:
            self._note(error, {**case, "what": "the device is lost: nothing more runs in this process"})
            raise DeviceLostError from error

    def apart(self, entry: str, seconds: float) -> None:
        """As `in_process`; in a dry run in this process, since starting one takes seconds of its own."""
        if not self.dry:
            self.in_process(entry, seconds)
            return
        module, _, function = entry.partition(":")
        with self.attempt(entry=entry):
            getattr(importlib.import_module(module), function)(self)

    def in_process(
        self,
        entry: str,
        seconds: float,
        *,
        prefix: Sequence[str] = (),
        **case: Value,
    ) -> bool:
        """Run a function of the form of a section's in a process of this one's group; its rows join those of this one.

        Args:
            entry: "module:function".
            seconds: after which it is killed.
            prefix: a command that runs it, as a sanitizer.
            case: what a row says if it fails.

        Returns:
            Whether it came to its end.
        """
        seconds = min(seconds, self.remaining() - 2)
        command = [*prefix, sys.executable, "-m", "benchmarks.device_check.child", entry, "--rows", str(self.rows)]
        command += ["--device", self.device, "--box", str(seconds), "--out", str(self.out), *["--dry"] * self.dry]
        problem, tail = _run(command, seconds)
        if problem is None:
            return True
        said = {"type": "process", "message": f"{entry}: {problem}", "traceback": tail}
        append_row(self.rows, Row(metric="error", value=None, case={"entry": entry, **case}, error=said))
        return False


def _run(command: Sequence[str], seconds: float) -> tuple[str | None, str]:
    """What went wrong with a command, or None, and the end of what it printed."""
    if seconds <= 0:
        return "no time is left for it", ""
    mark = f"{os.environ.get(MARK, secrets.token_hex(8))}/{secrets.token_hex(4)}"
    try:
        ended = run_boxed(command, mark=mark, seconds=seconds, environment=os.environ, own_session=False)
    except OSError as error:
        return str(error), ""
    if ended.is_over_time:
        return f"killed after {seconds:.0f} s", ended.tail
    if ended.signal is not None:
        return f"ended by {ended.signal}", ended.tail
    return None if ended.rc == 0 else f"ended with exit code {ended.rc}", ended.tail
