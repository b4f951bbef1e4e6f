"""Places of a captured call at which a test raises: each is an event, numbered in the order in which the call meets it.

events.arm(7); the call raises at its eighth event; events.seen tells the places by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
from runtime_helpers import Probe

from dsv4_compile.analysis.sizes import SizesOfCalls
from dsv4_compile.runtime import captured, uncaptured
from dsv4_compile.runtime.engines.host.engine import HostEngine
from dsv4_compile.runtime.engines.host.launch import Launch
from dsv4_compile.runtime.program import builder as program
from dsv4_compile.runtime.program.cache import ProgramCache
from dsv4_compile.runtime.program.codegen import SourceWriter
from dsv4_compile.runtime.program.keys import KeyReader


class InjectedError(Exception):
    """Raised on purpose."""


class InjectedInterrupt(KeyboardInterrupt):
    """The user's Ctrl-C, on purpose: no `Exception`."""


class Events:
    """Counts events and raises at one of them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.raised: BaseException | None = None
        self._at: int | None = None
        self._watching = False

    def watch(self) -> None:
        """Count from here on."""
        self.seen, self.raised, self._at, self._watching = [], None, None, True

    def arm(self, at: int) -> None:
        """Count from here on, and raise at event number `at`: an error, or at every third one an interrupt."""
        self.watch()
        self._at = at

    def stop(self) -> None:
        """Count and raise no more."""
        self._watching = False

    def __call__(self, place: str) -> None:
        """The call is at a place."""
        if not self._watching:
            return
        self.seen.append(place)
        if self._at == len(self.seen) - 1:
            self.raised = InjectedInterrupt(place) if self._at % 3 == 2 else InjectedError(place)
            raise self.raised

    def around(self, function: Callable[..., Any], place: str) -> Callable[..., Any]:
        """A function with an event before and after it."""

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self(f"before {place}")
            result = function(*args, **kwargs)
            self(f"after {place}")
            return result

        return watched


# Steps of building and of looking up: attribute of an owner, by the name they have there.
_STEPS = (
    (HostEngine, "allocate"),
    (HostEngine, "capture"),
    (Launch, "bind"),
    (KeyReader, "read"),
    (ProgramCache, "add"),
    (captured, "place_slots"),
    (SizesOfCalls, "of"),
    (captured, "build_program"),
    (captured, "OverlapCheck"),
    (program, "check_layout"),
    (program, "check_fresh"),
    (uncaptured, "check_layout"),
)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[Events]:
    """Events at every step of building, every op body, every recorded kernel and every line of a program."""
    events = Events()
    for owner, name in _STEPS:
        monkeypatch.setattr(owner, name, events.around(getattr(owner, name), name))
    monkeypatch.setattr(Probe, "called", staticmethod(lambda op: events(f"inside {op}")))
    bind, function = Launch.bind, SourceWriter.function

    def bind_watched(self: Launch) -> Callable[[], Any]:
        return events.around(bind(self), f"kernel {self.func.name()}")

    def function_watched(self: SourceWriter) -> Callable[..., Any]:
        events("before function")
        for name, value in self._objects.items():
            if callable(value) and not isinstance(value, type):
                self._objects[name] = events.around(value, f"line {name}")
        return function(self)

    monkeypatch.setattr(Launch, "bind", bind_watched)
    monkeypatch.setattr(SourceWriter, "function", function_watched)
    yield events
    events.stop()
