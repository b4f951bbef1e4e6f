"""What a case of the hazards is, and streams that are nothing on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps

import torch

from .bench import Bench
from .rows import Value

CYCLES = 200_000_000  # a tenth of a second or so


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen; `ok` is None where there is nothing to judge."""

    seen: Value
    expected: Value = "right"
    ok: bool | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A hazard: what it is about in a line, and what looks for it and writes a row."""

    what: str
    run: Callable[[Bench], None]


def register_into(cases: dict[str, Case], name: str) -> Callable[[Callable[[Bench], Finding]], Callable[[Bench], None]]:
    """A decorator that files a function as a case; what it finds, or raises, becomes a row."""

    def register(look: Callable[[Bench], Finding]) -> Callable[[Bench], None]:
        what = (look.__doc__ or "").partition("\n")[0]

        @wraps(look)
        def run(bench: Bench) -> None:
            with bench.attempt(id=name, what=what) as attempt, torch.no_grad():
                found = look(bench)
                bench.row("hazard", found.seen, expected=found.expected, ok=found.ok, id=name, what=what)
            if attempt.failed:
                bench.row("hazard", "an error", expected="right", id=name, what=what)

        cases[name] = Case(what, run)
        return run

    return register


def right(is_right: bool, otherwise: str = "wrong numbers") -> Finding:
    """The finding of a case that can go wrong in one way."""
    return Finding("right" if is_right else otherwise)


def streams(bench: Bench, count: int) -> list[torch.cuda.Stream | None]:
    """New streams; none on a CPU."""
    return [torch.cuda.Stream() if bench.device == "cuda" else None for _ in range(count)]


@contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Have a stream be the current one."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield


def sleep(bench: Bench) -> None:
    """Keep the current stream busy."""
    if bench.device == "cuda":
        torch.cuda._sleep(CYCLES)
