"""Counters of what the backend did; one process-wide object, `dsv4_compile.counters`, safe to use from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = (
    "graphs_compiled",
    "pieces_compiled",
    "pieces_reused",
    "regions",
    "captures",
    "replays",
    "recaptures",
    "uncaptured_calls",
    "eager_op_calls",
    "uncompiled_pieces",
    "traced_graph_calls",
    "replans",
    "full_replays",
    "torch_op_calls",
)


class Counters:
    """Named monotonic counts, read as attributes (`counters.replays`); every update takes one lock.

    | name | counts |
    |---|---|
    | graphs_compiled | Dynamo graphs handed to the backend and compiled |
    | pieces_compiled, pieces_reused | different pieces, compiled or run as they are, and copies of one of them |
    | regions | eager regions over all compiled graphs |
    | captures, recaptures | buckets captured; those captured again, since static inputs moved or died with a model |
    | replays | calls served by a captured program, the one that captured it included |
    | uncaptured_calls | calls that ran the pieces without a capture |
    | eager_op_calls | ops launched one by one inside eager regions |
    | uncompiled_pieces | pieces run or captured uncompiled, since a number is not the one they were compiled with |
    | traced_graph_calls | calls that broke an assumption of the plan, and ran the traced graph itself |
    | replans | graphs planned again, with more nodes eager, since a capture had to be refused |
    | full_replays | those replays in which the whole step was one graph: calls in a block of `uniform_decode` |
    | torch_op_calls | calls of an op of this package on a GPU that no kernel fits, so that plain torch served it |
    """

    graphs_compiled: int
    pieces_compiled: int
    pieces_reused: int
    regions: int
    captures: int
    replays: int
    recaptures: int
    uncaptured_calls: int
    eager_op_calls: int
    uncompiled_pieces: int
    traced_graph_calls: int
    replans: int
    full_replays: int
    torch_op_calls: int

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Set every count to zero."""
        with self._lock:
            for name in _NAMES:
                setattr(self, name, 0)

    def add(self, **amounts: int) -> None:
        """Add to the named counts; a name that is not a count raises TypeError."""
        _check_names(amounts)
        try:
            self._add(amounts)
        finally:
            if self._lock._is_owned():  # type: ignore[attr-defined]  # an interrupt came while the block was left
                self._lock.release()

    def _add(self, amounts: dict[str, int]) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> dict[str, int]:
        """All counts at one instant."""
        with self._lock:
            return {name: getattr(self, name) for name in _NAMES}

    @contextmanager
    def expect(self, **changes: int) -> Iterator[None]:
        """Raise AssertionError unless the block changes each named count by exactly the given amount."""
        _check_names(changes)
        before = self.snapshot()
        yield
        after = self.snapshot()
        seen = {name: after[name] - before[name] for name in changes}
        if seen != changes:
            raise AssertionError(f"expected the counts to change by {changes}, they changed by {seen}")

    def __repr__(self) -> str:
        return "Counters(" + ", ".join(f"{name}={count}" for name, count in self.snapshot().items()) + ")"


def _check_names(names: dict[str, int]) -> None:
    unknown = sorted(set(names) - set(_NAMES))
    if unknown:
        raise TypeError(f"unknown counters {unknown}; there are {list(_NAMES)}")


counters = Counters()
