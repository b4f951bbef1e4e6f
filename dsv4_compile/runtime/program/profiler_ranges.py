"""Ranges for a torch profiler: while one is on, a call shows its pieces and regions by their names in the plan.

    graph 0, bucket (16,)          a call that a program served
        piece_0                    one replay
        region_0                   eager ops, and copies of what later pieces take
        piece_1
    graph 0, bucket (16,), capture     the call that made it; each piece is captured and replayed in its range
    graph 0, warm-up                   the call before, with the same units in it
    graph 0, uncaptured                a call that no program can serve; the same

They are made by `torch.profiler.record_function`, so whatever reads torch's traces shows them beside torch's own.
Nothing is kept while no profiler is on: a program has a second function, with ranges, from the first call on that a
profiler sees. The choice is made once at the start of a call. A profiler that starts inside of a call sees ranges from
the next call on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from torch.profiler import record_function

from ...compat.dynamo import is_profiling

Result = TypeVar("Result")


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A range if a profiler is on; for what is slow enough not to feel the question."""
    return record_function(name) if is_profiling() else nullcontext()


def in_range(name: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """A function that calls another one in a range."""

    def call(*args: object) -> Result:
        with record_function(name):
            return function(*args)

    return call
