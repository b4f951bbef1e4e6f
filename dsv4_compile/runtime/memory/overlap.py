"""Which inputs of a call share memory, where the graph writes one of them; Dynamo guards none of it.

Two questions are asked, both in bytes from the first element to the last:

- `Aliasing`, by every call that no program serves: do inputs share memory as they did when the graph was traced? Moves,
  and compiled functions, assume so.
- `OverlapCheck`, on every replay: does a non-static input share memory with one that the graph writes? A program copies
  one of the two in. The ranges of static inputs are part of its key, so they are sorted once.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from ...analysis.byte_ranges import ByteRange, byte_range, ranges_meet
from ...graph.traced import TracedGraph, Value

Pairs = frozenset[tuple[int, int]]


def tensor_inputs(traced: TracedGraph) -> list[tuple[int, bool]]:
    """Indices of the inputs that are tensors, and whether the graph writes their memory."""
    written = traced.written()
    storages = [traced.storage_of(graph_input.node) for graph_input in traced.inputs]
    return [(index, storage in written) for index, storage in enumerate(storages) if storage is not None]


class Aliasing:
    """Compares calls with the trace.

    Args:
        traced: the graph.
        example_inputs: with which it was traced.
    """

    def __init__(self, traced: TracedGraph, example_inputs: Sequence[Value]) -> None:
        tensors = tensor_inputs(traced)
        has_plan = traced.run_as_traced is None  # else some input may have no address
        self._indices = tensors if has_plan and any(is_written for _, is_written in tensors) else []
        self._known = self.pairs(example_inputs)

    def differs(self, args: Sequence[Value]) -> bool:
        """Whether other inputs overlap, one of them written, than when the graph was traced."""
        return bool(self._indices) and self.pairs(args) != self._known

    def pairs(self, args: Sequence[Value]) -> Pairs:
        """Indices of inputs whose byte ranges meet, one of them written: one sweep over the ranges by their start."""
        ranges = sorted((*byte_range(args[index]), index, is_written) for index, is_written in self._indices)
        found: set[tuple[int, int]] = set()
        open_ranges: list[tuple[int, int, bool]] = []
        for start, end, index, is_written in ranges:
            open_ranges = [entry for entry in open_ranges if entry[0] > start]
            if end > start:
                meeting = [other for _, other, other_written in open_ranges if is_written or other_written]
                found |= {(min(index, other), max(index, other)) for other in meeting}
                open_ranges.append((end, index, is_written))
        return frozenset(found)


class OverlapCheck:
    """Whether a tensor that a graph writes shares memory with another one the call brings, one of them non-static.

    Args:
        traced: the graph.
        args: the arguments with which the program was built.
    """

    def __init__(self, traced: TracedGraph, args: Sequence[Value]) -> None:
        tensors = tensor_inputs(traced)
        fixed = [(byte_range(args[index]), is_written) for index, is_written in tensors if traced.inputs[index].static]
        self._non_static = [(index, is_written) for index, is_written in tensors if not traced.inputs[index].static]
        self._any_non_static_write = any(is_written for _, is_written in self._non_static)
        self._fixed = _Ranges([span for span, _ in fixed] if self._any_non_static_write else [])
        fixed_written = [span for span, is_written in fixed if is_written]
        self._fixed_written = _Ranges(fixed_written)
        can_overlap = bool(self._non_static) and (self._any_non_static_write or bool(fixed_written))
        self.check: Callable[[Sequence[Value]], bool] = self._overlaps if can_overlap else _never

    def _overlaps(self, args: Sequence[Value]) -> bool:
        non_static = [(byte_range(args[index]), is_written) for index, is_written in self._non_static]
        for span, is_written in non_static:
            if (self._fixed if is_written else self._fixed_written).meet(span):
                return True
        if not self._any_non_static_write:
            return False
        return any(
            (first_written or second_written) and ranges_meet(first, second)
            for index, (first, first_written) in enumerate(non_static)
            for second, second_written in non_static[index + 1 :]
        )


class _Ranges:
    """Byte ranges, which may overlap each other, sorted for a look-up by bisection."""

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        ordered = sorted(ranges)
        self._starts = [start for start, _ in ordered]
        self._furthest = list(itertools.accumulate((end for _, end in ordered), max))

    def meet(self, span: ByteRange) -> bool:
        """Whether a range touches any of them: one that starts before its end reaches beyond its start."""
        start, end = span
        before = bisect.bisect_left(self._starts, end)
        return before > 0 and start < end and self._furthest[before - 1] > start


def _never(args: Sequence[Value]) -> bool:
    return False
