"""An interrupt at a chosen place of a call: where Python calls a function, or where a line of the package begins.

A signal handler runs between two bytecodes, so it may raise anywhere. `sys.settrace` shows these places and may raise
there as well. What lies above the package's own frames (Dynamo's wrappers) is not ours, and is left alone.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from repository import ROOT

OWN = tuple(f"{ROOT / folder}/" for folder in ("dsv4_compile", "passes", "ops"))


class HandlerError(RuntimeError):
    """What a signal handler raised, on purpose; of a class that careless code might swallow."""


@dataclass
class Interrupts:
    """Counts places, and raises at one of them.

    Attributes:
        starts: the function of the package below whose frame places count.
        lines: count the lines of the package too, not calls alone.
        opcodes: and each bytecode of the package.
        at: the place to raise at; None to only count.
        error: what to raise.
    """

    starts: str
    lines: bool = False
    opcodes: bool = False
    at: int | None = None
    error: type[BaseException] = KeyboardInterrupt
    places: list[str] = field(default_factory=list)
    raised: bool = False
    _root: FrameType | None = None

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function under the tracer.

        No garbage is collected meanwhile: that is due where other tests have brought it, so the places of its callbacks
        (Hypothesis has some) and finalizers are others in each run. The collector stays enabled, as a capture asks it.
        """
        before, thresholds = sys.gettrace(), gc.get_threshold()
        gc.set_threshold(0)
        trace = self._trace  # kept: Python calls it once more where it has dropped it, as what it raises is swallowed
        sys.settrace(trace)
        try:
            return function()
        finally:
            sys.settrace(before)
            self._root = None
            gc.set_threshold(*thresholds)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if self._root is None:
            if frame.f_code.co_name != self.starts or not frame.f_code.co_filename.startswith(OWN):
                return None
            self._root = frame
        is_own = frame.f_code.co_filename.startswith(OWN)
        self._visit(frame, event)
        frame.f_trace_opcodes = self.opcodes and is_own
        # the end of the root is awaited by its own events; in others lines count where they are ours
        return self._local if frame is self._root or (is_own and (self.lines or self.opcodes)) else None

    def _local(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return" and frame is self._root:
            self._root = None
            sys.settrace(None)
        elif (event == "line" and self.lines) or (event == "opcode" and self.opcodes):
            self._visit(frame, event)
        return self._local

    def _visit(self, frame: FrameType, event: str) -> None:
        if self.raised:
            return
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11 on
        self.places.append(f"{event} {name}:{frame.f_lineno}")
        if self.at == len(self.places) - 1:
            self.raised = True
            sys.settrace(None)
            raise self.error(self.places[-1])
