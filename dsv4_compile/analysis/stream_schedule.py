"""Put the ops of a piece on streams so that it ends early by estimate, and find the events that this takes.

This is list scheduling: of the ops that could start first, the one with the longest path after it is taken, and goes to
the stream where it starts first. A side stream must gain the event that it takes to come back from there. On a tie an
op stays with the ops it has to do with (those before it, and those that its successors need as well), else stream 0 has
it. A branch that costs no more than the two events of its fork and join stays on stream 0, and the rest is placed
anew; a piece that would not end earlier for all that stays on stream 0 altogether.

    a --- b --- c --- e        stream 0  a  b  c  e            b, c and d, f cost more than two events
     \\--- d --- f ---/         stream 1     d  f               d waits for a, e waits for f

Ops are numbers in program order, and each stream runs its ops in that order. A wrong estimate costs time and never
results: `events_of` derives the waits from what must come before what, whoever chose the streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

EVENT = 1  # what it costs to wait for another stream, in the unit of the costs
START = -1  # the start of the piece on stream 0, as something to wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What the streams of a piece wait for, and no more than is needed.

    Attributes:
        waits: by op, the ops of other streams that its stream waits for right before it; `START` if it is forked from
            stream 0 without waiting for an op.
        joins: the ops that stream 0 waits for at the end.
    """

    waits: tuple[tuple[int, ...], ...]
    joins: tuple[int, ...]


def schedule(before: Sequence[Collection[int]], costs: Sequence[int], side_streams: int) -> tuple[int, ...]:
    """The stream of each op: 0, or one of up to `side_streams` more, numbered from the one with most work.

    Args:
        before: by op, the earlier ones it must come after.
        costs: by op, its estimated time, at least 1.
        side_streams: how many streams may be used beside stream 0.
    """
    light: set[int] = set()
    while True:
        streams = _Placing(before, costs, side_streams, light).run()
        branches = _branches(streams, events_of(before, streams))
        found = {op for ops in branches if sum(costs[op] for op in ops) <= 2 * EVENT for op in ops}
        light |= found
        if not found:
            pays = estimate(before, costs, streams) < sum(costs)
            return _by_work(streams, costs) if pays else (0,) * len(streams)


def estimate(before: Sequence[Collection[int]], costs: Sequence[int], streams: Sequence[int]) -> int:
    """When all streams are joined, if each runs its ops in program order and every event costs `EVENT`."""
    finish: list[int] = []
    free: dict[int, int] = {}
    for op, stream in enumerate(streams):
        arrivals = [finish[other] + (EVENT if streams[other] != stream else 0) for other in before[op]]
        finish.append(max([free.get(stream, EVENT if stream else 0), *arrivals]) + costs[op])
        free[stream] = finish[op]
    return max((end + (EVENT if stream else 0) for stream, end in free.items()), default=0)


def events_of(before: Sequence[Collection[int]], streams: Sequence[int]) -> Events:
    """The events that keep the order `before` on these streams, fork each from stream 0 and join it into stream 0."""
    known: dict[int, dict[int, int]] = {0: {0: START}}  # by stream: the last op of every stream that it comes after
    past_of: list[dict[int, int]] = []  # the same by op, with itself
    waits: list[tuple[int, ...]] = []
    for op, stream in enumerate(streams):
        clock = known.setdefault(stream, {})
        last = {streams[other]: other for other in sorted(before[op])}
        waits.append(_missing(last, clock, past_of) or (() if 0 in clock else (START,)))
        for other in waits[-1]:
            for past, count in (past_of[other] if other != START else {0: START}).items():
                clock[past] = max(count, clock.get(past, count))
        clock[stream] = op
        past_of.append(dict(clock))
    joins = _missing({stream: op for op, stream in enumerate(streams)}, known[0], past_of)
    return Events(waits=tuple(waits), joins=joins)


def _missing(
    last: Mapping[int, int], clock: Mapping[int, int], past_of: Sequence[Mapping[int, int]]
) -> tuple[int, ...]:
    """Of the last ops wanted of each stream, those not in our past, nor in the past of another one of them."""
    wanted = {stream: op for stream, op in last.items() if clock.get(stream, START) < op}
    return tuple(
        op
        for stream, op in sorted(wanted.items())
        if not any(past_of[other].get(stream, START) >= op for other in wanted.values() if other != op)
    )


def _branches(streams: Sequence[int], events: Events) -> Iterator[list[int]]:
    """Runs of ops on a side stream that begin where it waits for another stream."""
    branches: dict[int, list[int]] = {}
    for op, stream in enumerate(streams):
        if stream and events.waits[op] and stream in branches:
            yield branches.pop(stream)
        if stream:
            branches.setdefault(stream, []).append(op)
    yield from branches.values()


def _by_work(streams: Sequence[int], costs: Sequence[int]) -> tuple[int, ...]:
    """The same streams, side streams numbered by the work they have, then by their first op."""
    work: Counter[int] = Counter()
    for stream, cost in zip(streams, costs, strict=True):
        work[stream] += cost
    side = sorted(set(streams) - {0}, key=lambda stream: (-work[stream], streams.index(stream)))
    number = {0: 0, **{stream: index for index, stream in enumerate(side, 1)}}
    return tuple(number[stream] for stream in streams)


class _Placing:
    """One run of the list scheduling; the ops in `light` go to stream 0."""

    def __init__(
        self, before: Sequence[Collection[int]], costs: Sequence[int], side_streams: int, light: Collection[int]
    ) -> None:
        self._before = [frozenset(earlier) for earlier in before]
        self._costs, self._light = costs, light
        self._after: list[list[int]] = [[] for _ in before]
        for op, earlier in enumerate(self._before):
            for other in earlier:
                self._after[other].append(op)
        self._path = list(costs)  # the longest one from the start of an op to the end of the piece
        for op in reversed(range(len(before))):
            self._path[op] += max((self._path[later] for later in self._after[op]), default=0)
        self._free = [0] + [EVENT] * side_streams  # when each stream is free; a side stream is forked first
        self._streams: dict[int, int] = {}
        self._finish: dict[int, int] = {}
        self._ready = {op: [0] * len(self._free) for op, earlier in enumerate(self._before) if not earlier}

    def run(self) -> list[int]:
        """The stream of each op."""
        while self._ready:
            costs = {op: self._starts(op, arrivals) for op, arrivals in self._ready.items()}
            op = min(costs, key=lambda op: (min(costs[op]), -self._path[op], op))
            self._put(op, self._choose(op, costs[op]))
        return [self._streams[op] for op in range(len(self._before))]

    def _starts(self, op: int, arrivals: Sequence[int]) -> list[int]:
        """By stream, when a ready op could start there, with the event that leads back to stream 0."""
        usable = arrivals[:1] if op in self._light else arrivals
        return [max(arrival, self._free[stream]) + (EVENT if stream else 0) for stream, arrival in enumerate(usable)]

    def _choose(self, op: int, costs: Sequence[int]) -> int:
        related = self._before[op].union(*(self._before[later] for later in self._after[op]))
        near = [self._streams[other] for other in related if other in self._streams]
        return min(range(len(costs)), key=lambda stream: (costs[stream], -near.count(stream), stream))

    def _put(self, op: int, stream: int) -> None:
        start = max(self._ready.pop(op)[stream], self._free[stream])
        self._streams[op] = stream
        self._finish[op] = self._free[stream] = start + self._costs[op]
        for later in self._after[op]:
            if self._before[later] <= self._streams.keys():
                self._ready[later] = [self._arrival(later, at) for at in range(len(self._free))]

    def _arrival(self, op: int, stream: int) -> int:
        """When all that an op must come after has reached a stream."""
        return max(self._finish[other] + (EVENT if self._streams[other] != stream else 0) for other in self._before[op])
