"""Put the ops of a piece on lanes so that it ends early by estimate, and find the events that this takes.

This is list scheduling: of the ops that could start first, the one with the longest path behind it is taken, and goes
to the lane where it starts first. A side lane must gain the event that it takes to come back from there. On a tie an op
stays with the ops it has to do with (those before it, and those that its successors need as well), else lane 0 has it.
A branch that weighs no more than the two events of its fork and join stays on lane 0, and the rest is placed anew; a
piece that would not end earlier for all that stays on lane 0 altogether.

    a --- b --- c --- e        lane 0  a  b  c  e            b, c and d, f weigh more than two events
     \\--- d --- f ---/         lane 1     d  f               d waits for a, e waits for f

Ops are numbers in program order, and each lane runs its ops in that order. A wrong estimate costs time and never
results: `events_of` derives the waits from what must come before what, whoever chose the lanes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

EVENT = 1  # what it costs to wait for another lane, in the unit of the weights
START = -1  # the start of the piece on lane 0, as something to wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What the lanes of a piece wait for, and no more than is needed.

    Attributes:
        waits: by op, the ops of other lanes that its lane waits for right before it; `START` if it is forked from
            lane 0 without waiting for an op.
        joins: the ops that lane 0 waits for at the end.
    """

    waits: tuple[tuple[int, ...], ...]
    joins: tuple[int, ...]


def schedule(before: Sequence[Collection[int]], weights: Sequence[int], side_lanes: int) -> tuple[int, ...]:
    """The lane of each op: 0, or one of up to `side_lanes` more, numbered from the one with most work.

    Args:
        before: by op, the earlier ones it must stay behind.
        weights: by op, its estimated time, at least 1.
        side_lanes: how many lanes may be used beside lane 0.
    """
    light: set[int] = set()
    while True:
        lanes = _Placing(before, weights, side_lanes, light).run()
        branches = _branches(lanes, events_of(before, lanes))
        found = {op for ops in branches if sum(weights[op] for op in ops) <= 2 * EVENT for op in ops}
        light |= found
        if not found:
            pays = estimate(before, weights, lanes) < sum(weights)
            return _by_work(lanes, weights) if pays else (0,) * len(lanes)


def estimate(before: Sequence[Collection[int]], weights: Sequence[int], lanes: Sequence[int]) -> int:
    """When all lanes are joined, if each runs its ops in program order and every event costs `EVENT`."""
    finish: list[int] = []
    free: dict[int, int] = {}
    for op, lane in enumerate(lanes):
        arrivals = [finish[other] + (EVENT if lanes[other] != lane else 0) for other in before[op]]
        finish.append(max([free.get(lane, EVENT if lane else 0), *arrivals]) + weights[op])
        free[lane] = finish[op]
    return max((end + (EVENT if lane else 0) for lane, end in free.items()), default=0)


def events_of(before: Sequence[Collection[int]], lanes: Sequence[int]) -> Events:
    """The events that keep the order `before` on these lanes, fork each from lane 0 and join it into lane 0."""
    known: dict[int, dict[int, int]] = {0: {0: START}}  # by lane: the last op of every lane that it is behind
    behind: list[dict[int, int]] = []  # the same by op, with itself
    waits: list[tuple[int, ...]] = []
    for op, lane in enumerate(lanes):
        clock = known.setdefault(lane, {})
        last = {lanes[other]: other for other in sorted(before[op])}
        waits.append(_missing(last, clock, behind) or (() if 0 in clock else (START,)))
        for other in waits[-1]:
            for past, count in (behind[other] if other != START else {0: START}).items():
                clock[past] = max(count, clock.get(past, count))
        clock[lane] = op
        behind.append(dict(clock))
    joins = _missing({lane: op for op, lane in enumerate(lanes)}, known[0], behind)
    return Events(waits=tuple(waits), joins=joins)


def _missing(last: Mapping[int, int], clock: Mapping[int, int], behind: Sequence[Mapping[int, int]]) -> tuple[int, ...]:
    """Of the last ops wanted of each lane, those not in our past, nor in the past of another one of them."""
    wanted = {lane: op for lane, op in last.items() if clock.get(lane, START) < op}
    return tuple(
        op
        for lane, op in sorted(wanted.items())
        if not any(behind[other].get(lane, START) >= op for other in wanted.values() if other != op)
    )


def _branches(lanes: Sequence[int], events: Events) -> Iterator[list[int]]:
    """Runs of ops on a side lane that begin where it waits for another lane."""
    branches: dict[int, list[int]] = {}
    for op, lane in enumerate(lanes):
        if lane and events.waits[op] and lane in branches:
            yield branches.pop(lane)
        if lane:
            branches.setdefault(lane, []).append(op)
    yield from branches.values()


def _by_work(lanes: Sequence[int], weights: Sequence[int]) -> tuple[int, ...]:
    """The same lanes, side lanes numbered by the work they have, then by their first op."""
    work: Counter[int] = Counter()
    for lane, weight in zip(lanes, weights, strict=True):
        work[lane] += weight
    side = sorted(set(lanes) - {0}, key=lambda lane: (-work[lane], lanes.index(lane)))
    number = {0: 0, **{lane: index for index, lane in enumerate(side, 1)}}
    return tuple(number[lane] for lane in lanes)


class _Placing:
    """One run of the list scheduling; the ops in `light` go to lane 0."""

    def __init__(
        self, before: Sequence[Collection[int]], weights: Sequence[int], side_lanes: int, light: Collection[int]
    ) -> None:
        self._before = [frozenset(earlier) for earlier in before]
        self._weights, self._light = weights, light
        self._after: list[list[int]] = [[] for _ in before]
        for op, earlier in enumerate(self._before):
            for other in earlier:
                self._after[other].append(op)
        self._path = list(weights)  # the longest one from the start of an op to the end of the piece
        for op in reversed(range(len(before))):
            self._path[op] += max((self._path[later] for later in self._after[op]), default=0)
        self._free = [0] + [EVENT] * side_lanes  # when each lane is free; a side lane is forked first
        self._lanes: dict[int, int] = {}
        self._finish: dict[int, int] = {}
        self._ready = {op: [0] * len(self._free) for op, earlier in enumerate(self._before) if not earlier}

    def run(self) -> list[int]:
        """The lane of each op."""
        while self._ready:
            costs = {op: self._costs(op, arrivals) for op, arrivals in self._ready.items()}
            op = min(costs, key=lambda op: (min(costs[op]), -self._path[op], op))
            self._put(op, self._choose(op, costs[op]))
        return [self._lanes[op] for op in range(len(self._before))]

    def _costs(self, op: int, arrivals: Sequence[int]) -> list[int]:
        """By lane, when a ready op could start there, with the event that leads back to lane 0."""
        usable = arrivals[:1] if op in self._light else arrivals
        return [max(arrival, self._free[lane]) + (EVENT if lane else 0) for lane, arrival in enumerate(usable)]

    def _choose(self, op: int, costs: Sequence[int]) -> int:
        related = self._before[op].union(*(self._before[later] for later in self._after[op]))
        near = [self._lanes[other] for other in related if other in self._lanes]
        return min(range(len(costs)), key=lambda lane: (costs[lane], -near.count(lane), lane))

    def _put(self, op: int, lane: int) -> None:
        start = max(self._ready.pop(op)[lane], self._free[lane])
        self._lanes[op] = lane
        self._finish[op] = self._free[lane] = start + self._weights[op]
        for later in self._after[op]:
            if self._before[later] <= self._lanes.keys():
                self._ready[later] = [self._arrival(later, at) for at in range(len(self._free))]

    def _arrival(self, op: int, lane: int) -> int:
        """When all that an op must stay behind has reached a lane."""
        return max(self._finish[other] + (EVENT if self._lanes[other] != lane else 0) for other in self._before[op])
