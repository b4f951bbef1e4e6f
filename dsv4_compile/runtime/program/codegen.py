"""Writes the straight-line Python of a program: statements, and the objects that their names stand for.

The same statements make two functions: the straight line, and for profilers one in which each unit is a range.
"""

from __future__ import annotations

import itertools
import linecache
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.profiler import record_function

from ...graph.collective_call import callee
from ...graph.traced import Value

_numbers = itertools.count()  # names tracebacks apart
Operands = Mapping[fx.Node, str]
Function = Callable[[tuple[Value, ...]], Value]


class SourceWriter:
    """Collects statements of one function `program(args)`."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._lines: list[str] = []
        self._last_lines: list[str] = []
        self._guarded_from = 0
        self._guarded_to: int | None = None
        self._units: list[tuple[int, int, str]] = []
        self._objects: dict[str, object] = {}
        self._names: dict[int, str] = {}

    def line(self, text: str) -> None:
        """Add a statement."""
        self._lines.append(f"    {text}")

    @contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """The statements that the block adds are one unit."""
        start = len(self._lines)
        yield
        self._units.append((start, len(self._lines), name))

    def last_line(self, text: str) -> None:
        """Add a statement that runs at the end of a call, also of one that fails after this point.

        All units come after it.
        """
        assert not self._units, "a unit cannot be cut by what guards the rest"
        self._last_lines.append(text)
        self._guarded_from = len(self._lines)

    def end_guard(self) -> None:
        """What is added from here on runs after those last statements."""
        self._guarded_to = len(self._lines)

    def name_of(self, value: object, prefix: str) -> str:
        """The name under which the program finds an object, which it keeps alive."""
        if id(value) not in self._names:
            name = f"k{len(self._objects)}_{prefix}"  # no variable starts with k and a number
            self._names[id(value)] = name
            self._objects[name] = value
        return self._names[id(value)]

    def text_of(self, arg: object, operands: Operands) -> str:
        """An argument of an fx node as Python: nodes by `operands`, plain values as literals, the rest by name."""
        if isinstance(arg, fx.Node):
            return operands[arg]
        if arg is None or isinstance(arg, (bool, int, str)) or (isinstance(arg, float) and math.isfinite(arg)):
            return repr(arg)
        if isinstance(arg, slice):
            return f"slice({', '.join(self.text_of(part, operands) for part in (arg.start, arg.stop, arg.step))})"
        if isinstance(arg, (tuple, list)) and not isinstance(arg, torch.Size):
            items = ", ".join(self.text_of(item, operands) for item in arg)
            return f"[{items}]" if isinstance(arg, list) else f"({items}{',' if len(arg) == 1 else ''})"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{key!r}: {self.text_of(value, operands)}" for key, value in arg.items()) + "}"
        return self.name_of(arg, "const")

    def call_text(self, node: fx.Node, operands: Operands) -> str:
        """The call an fx node makes."""
        args = [self.text_of(arg, operands) for arg in node.args]
        args += [f"{key}={self.text_of(value, operands)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:])})"
        target = callee(node)
        name = getattr(target, "__name__", "op").replace(".", "_")
        function = self.name_of(target, name if name.isidentifier() else "op")
        return f"{function}({', '.join(args)})"

    def text(self) -> str:
        """The source of the function."""
        return self._text_of(self._guarded(self._lines))

    def function(self) -> Function:
        """The compiled function; a traceback shows its lines."""
        return self._compiled(self.text())

    def function_with_ranges(self) -> Function:
        """The same for a profiler: a range for the call, and in it one for each unit."""
        enter = self.name_of(record_function, "range")
        lines = list(self._lines)
        for start, end, name in reversed(self._units):  # from the end, so that the indices before it hold
            # a unit may come without a statement, such as a region with a view of a weight
            lines[start:end] = [f"    with {enter}({name!r}):", *_indented(lines[start:end]), "        pass"]
        whole = _indented(self._guarded(lines))
        return self._compiled(self._text_of([f"    with {enter}({self._title!r}):", *whole]))

    def _guarded(self, lines: Sequence[str]) -> list[str]:
        if not self._last_lines:
            return list(lines)
        num_after = 0 if self._guarded_to is None else len(self._lines) - self._guarded_to
        end = len(lines) - num_after  # counted from there: units may have got statements of their own
        first, guarded = lines[: self._guarded_from], _indented(lines[self._guarded_from : end])
        last = [f"        {line}" for line in self._last_lines]
        return [*first, "    try:", *guarded, "    finally:", *last, *lines[end:]]

    def _text_of(self, lines: Sequence[str]) -> str:
        return "\n".join([f"# {self._title}", "def program(args):", *lines])

    def _compiled(self, source: str) -> Function:
        path = f"<dsv4_compile program {next(_numbers)}: {self._title}>"
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        scope: dict[str, Any] = dict(self._objects)
        exec(compile(source, path, "exec"), scope)  # our own text, from the plan
        # taken out of its own globals, or it would live until the garbage collector finds the cycle
        function: Function = scope.pop("program")
        weakref.finalize(function, linecache.cache.pop, path, None)
        return function


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
