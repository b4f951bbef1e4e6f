"""Which inputs of a call share memory, where the graph writes one of them; Dynamo guards none of it.

Two questions are asked, both in bytes from the first element to the last:

- `Aliasing`, by whatever runs parts of pieces: do inputs share memory that did not when the graph was traced? A
  compiled function takes them to be apart.
- `OverlapCheck`, on every replay: does a moving input share memory with one that the graph writes? A program stages one
  of the two. The ranges of static inputs are part of its key, so they are sorted once.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..draft import Draft
from .sizes import bytes_needed

ByteRange = tuple[int, int]
Pairs = frozenset[tuple[int, int]]


def byte_range(tensor: Tensor) -> ByteRange:
    """First address of a tensor's elements, and the one behind the last; (0, 0) if it has none."""
    count = tensor.numel()
    if not count:
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + count * tensor.element_size()
    return start, start + bytes_needed(tensor.size(), tensor.stride(), tensor.element_size())


def ranges_meet(first: ByteRange, second: ByteRange) -> bool:
    """Whether two ranges have a byte in common."""
    return first[0] < second[1] and second[0] < first[1]


def tensor_inputs(draft: Draft) -> list[tuple[int, bool]]:
    """Places of the inputs that are tensors, and whether the graph writes their memory."""
    written = draft.written()
    storages = [draft.storage_of(graph_input.node) for graph_input in draft.inputs]
    return [(place, storage in written) for place, storage in enumerate(storages) if storage is not None]


class Aliasing:
    """Compares calls with the trace.

    Args:
        draft: the graph.
        example_inputs: with which it was traced.
    """

    def __init__(self, draft: Draft, example_inputs: Sequence[Any]) -> None:
        tensors = tensor_inputs(draft)
        self._places = tensors if any(is_written for _, is_written in tensors) else []
        self._known = self.pairs(example_inputs)

    def is_new(self, args: Sequence[Any]) -> bool:
        """Whether two inputs, one of them written, overlap that did not when the graph was traced."""
        return bool(self._places) and not self.pairs(args) <= self._known

    def pairs(self, args: Sequence[Any]) -> Pairs:
        """Places of inputs whose byte ranges meet, one of them written: one sweep over the ranges by their start."""
        ranges = sorted((*byte_range(args[place]), place, is_written) for place, is_written in self._places)
        found: set[tuple[int, int]] = set()
        open_ranges: list[tuple[int, int, bool]] = []
        for start, end, place, is_written in ranges:
            open_ranges = [entry for entry in open_ranges if entry[0] > start]
            if end > start:
                meeting = [other for _, other, other_written in open_ranges if is_written or other_written]
                found |= {(min(place, other), max(place, other)) for other in meeting}
                open_ranges.append((end, place, is_written))
        return frozenset(found)


class OverlapCheck:
    """Whether a tensor that a graph writes shares memory with another one the call brings, one of them moving.

    Args:
        draft: the graph.
        args: the arguments with which the program was built.
    """

    def __init__(self, draft: Draft, args: Sequence[Any]) -> None:
        tensors = tensor_inputs(draft)
        fixed = [(byte_range(args[place]), is_written) for place, is_written in tensors if draft.inputs[place].static]
        self._moving = [(place, is_written) for place, is_written in tensors if not draft.inputs[place].static]
        self._any_moving_write = any(is_written for _, is_written in self._moving)
        self._fixed = _Ranges([span for span, _ in fixed] if self._any_moving_write else [])
        fixed_written = [span for span, is_written in fixed if is_written]
        self._fixed_written = _Ranges(fixed_written)
        can_overlap = bool(self._moving) and (self._any_moving_write or bool(fixed_written))
        self.check: Callable[[Sequence[Any]], bool] = self._overlaps if can_overlap else _never

    def _overlaps(self, args: Sequence[Any]) -> bool:
        moving = [(byte_range(args[place]), is_written) for place, is_written in self._moving]
        for span, is_written in moving:
            if (self._fixed if is_written else self._fixed_written).meet(span):
                return True
        if not self._any_moving_write:
            return False
        return any(
            (first_written or second_written) and ranges_meet(first, second)
            for index, (first, first_written) in enumerate(moving)
            for second, second_written in moving[index + 1 :]
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


def _never(args: Sequence[Any]) -> bool:
    return False
