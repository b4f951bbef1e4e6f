"""Which inputs of a call share memory, where the graph writes one of them.

A compiled function takes its inputs to be apart, except where they were not when it was traced, and Dynamo guards
neither. So every call that would run one asks whether its own inputs share what the traced ones did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..draft import Draft, TensorMeta
from .keys import byte_range

Pairs = frozenset[tuple[int, int]]


class Aliasing:
    """Compares calls with the trace.

    Args:
        draft: the graph.
        example_inputs: with which it was traced.
    """

    def __init__(self, draft: Draft, example_inputs: Sequence[Any]) -> None:
        written = {storage for effects in draft.effects.values() for storage in effects.writes}
        metas = [(place, draft.effects[graph_input.node].result) for place, graph_input in enumerate(draft.inputs)]
        tensors = [(place, meta.storage in written) for place, meta in metas if isinstance(meta, TensorMeta)]
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
