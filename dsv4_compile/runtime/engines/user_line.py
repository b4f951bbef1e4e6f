"""The user's line that runs now, or ran when an exception was raised: neither torch's nor an engine's."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
from collections.abc import Iterable
from types import FrameType, TracebackType

import torch
from torch import fx

from ...compat import dispatch as compat
from ...graph.source_lines import where

_RUNTIME = os.path.dirname(os.path.dirname(__file__))
# folders of torch, of this runtime, and of what both go through
_SKIPPED = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(_RUNTIME, ""),
    os.path.join(os.path.dirname(compat.__file__), ""),
    contextlib.__file__,
)
_ASSIGNED = re.compile(r"\s*(\w+)\b.*? = ")


def current_line() -> str:
    """ "model.py:41 in forward: x.item()" for the innermost frame of the user's."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _innermost(frames)


def line_of(error: BaseException) -> str:
    """The same for where an exception was raised."""
    frames: list[tuple[FrameType, int]] = []
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        frames.insert(0, (traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _innermost(frames)


def name_in_code(error: BaseException, module: fx.GraphModule) -> str | None:
    """The name of the node of a module in whose generated code an exception came, if its line names one."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if traceback.tb_frame.f_locals.get("self") is module and not os.path.exists(code.co_filename):
            line = linecache.getline(code.co_filename, traceback.tb_lineno, traceback.tb_frame.f_globals)
            assigned = _ASSIGNED.match(line)
            return None if assigned is None else assigned.group(1)
        traceback = traceback.tb_next
    return None


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, number in frames:
        path = frame.f_code.co_filename
        code = linecache.getline(path, number, frame.f_globals).strip()
        if isinstance(frame.f_locals.get("self"), fx.GraphModule) and not os.path.exists(path):
            return _traced_line(code, frame.f_locals["self"])
        if not path.startswith(_SKIPPED):
            return f"{path}:{number} in {frame.f_code.co_name}: {code}".removesuffix(": ")
    return "no source line known"


def _traced_line(code: str, module: fx.GraphModule) -> str:
    """The line that a line of a graph module's generated code was traced from."""
    assigned = _ASSIGNED.match(code)
    for node in module.graph.nodes:
        if assigned and node.name == assigned.group(1) and node.stack_trace:
            return where(node)
    return f"generated code: {code}"
