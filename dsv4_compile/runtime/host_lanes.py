"""The happens-before checker of the host engine: side lanes must be ordered by events, not by luck.

A host runs launches one after another, so a missing event never shows in its numbers. Two things take the luck away.
`check_races` follows a log with one vector clock a lane: an access must come behind every earlier one that it
conflicts with, by lane order and events alone. `shuffled` gives the launches in another order that the events allow.

    lane 0:  gemm, Record(0), norm, ..., Wait(1)        lane 1:  Wait(0), side gemm, Record(1)

A side lane begins with a wait for something of lane 0 (the fork), and in the end lane 0 waits for it (the join), so
that nothing of a piece overlaps what runs before or after the piece.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..errors import LaneRaceError

ByteRange = tuple[int, int]  # first address, address behind the last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneLaunch:
    """One kernel on a lane; compared by identity, so that two launches of one op are two.

    Attributes:
        name: shown in errors.
        lane: 0 for the main lane, side lanes from 1.
        reads, writes: ranges of addresses; an empty range touches nothing.
    """

    name: str
    lane: int
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The event stands for all that its lane was given so far; recorded again, it stands for more."""

    lane: int
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What its lane is given from here on runs behind what the event stands for at this place in the log."""

    lane: int
    event: int


Entry = LaneLaunch | Record | Wait
Clock = dict[int, int]  # lane -> how many of its launches have run for certain; lane 0 is in it once forked from there


def check_races(log: Sequence[Entry]) -> None:
    """Check the log of one piece, its entries in the order in which the host issued them.

    Raises:
        LaneRaceError: two launches conflict and are unordered; a side lane is not forked from lane 0, or not joined
            into it by the end; a wait for an event that was not recorded before.
    """
    clocks = _start()
    last: dict[int, LaneLaunch] = {}
    memory = _Memory()
    for launch, before in _launches(log, clocks):
        if 0 not in before:
            raise LaneRaceError(
                f"{launch.name} runs on lane {launch.lane}, which is not forked from lane 0: record an event on lane 0 "
                f"and let lane {launch.lane} wait for it before its first launch"
            )
        memory.touch(launch, before)
        last[launch.lane] = launch
    _check_joined(clocks, last)


def shuffled(log: Sequence[Entry], seed: int) -> tuple[LaneLaunch, ...]:
    """The launches in a random order that lanes and events allow; equal seeds give equal orders.

    Each time, one of the launches that may come next is chosen, all with the same chance.

    Raises:
        LaneRaceError: a wait for an event that was not recorded before.
    """
    draw = random.Random(seed)
    queues: dict[int, deque[tuple[LaneLaunch, Clock]]] = {}
    for launch, before in _launches(log, _start()):
        queues.setdefault(launch.lane, deque()).append((launch, before))
    done: Counter[int] = Counter()
    order: list[LaneLaunch] = []
    # the first launch of the log that has not run is always ready, so this ends with all of them
    while ready := [lane for lane, queue in sorted(queues.items()) if queue and _has_run(queue[0][1], done)]:
        lane = draw.choice(ready)
        order.append(queues[lane].popleft()[0])
        done[lane] += 1
    return tuple(order)


def _start() -> dict[int, Clock]:
    return {0: {0: 0}}


def _launches(log: Sequence[Entry], clocks: dict[int, Clock]) -> Iterator[tuple[LaneLaunch, Clock]]:
    """Each launch with what has run before it for certain; `clocks` follows, by lane."""
    events: dict[int, Clock] = {}
    for entry in log:
        clock = clocks.setdefault(entry.lane, {})
        if isinstance(entry, Record):
            events[entry.event] = dict(clock)
        elif isinstance(entry, LaneLaunch):
            yield entry, dict(clock)
            clock[entry.lane] = clock.get(entry.lane, 0) + 1
        elif entry.event in events:
            for lane, count in events[entry.event].items():
                clock[lane] = max(count, clock.get(lane, 0))
        else:
            raise LaneRaceError(
                f"lane {entry.lane} waits for event {entry.event}, which was not recorded before: record it first, on "
                "the lane that is to be waited for"
            )


def _has_run(wanted: Clock, done: Mapping[int, int]) -> bool:
    return all(done[lane] >= count for lane, count in wanted.items())


def _check_joined(clocks: Mapping[int, Clock], last: Mapping[int, LaneLaunch]) -> None:
    for lane, launch in sorted(last.items()):
        if clocks[0].get(lane, 0) < clocks[lane][lane]:
            raise LaneRaceError(
                f"lane {lane} is not joined into lane 0: {launch.name} may still run when the piece has ended; record "
                f"an event on lane {lane} after it and let lane 0 wait for it"
            )


@dataclass(frozen=True, slots=True)
class _Access:
    launch: LaneLaunch
    number: int  # among the launches of its lane, from 1

    def is_behind(self, before: Clock) -> bool:
        return before.get(self.launch.lane, 0) >= self.number


@dataclass(slots=True)
class _Span:
    """Bytes that were touched by the same launches: the last one that wrote them, and by lane the last to read."""

    start: int
    stop: int
    write: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict)


class _Memory:
    """Who touched which bytes last: disjoint spans in order of address.

    Older accesses may be forgotten: one of those kept comes behind them (or that pair was refused), so what is ordered
    behind the kept ones is ordered behind all.
    """

    def __init__(self) -> None:
        self._spans: list[_Span] = []

    def touch(self, launch: LaneLaunch, before: Clock) -> None:
        """Note the accesses of a launch, each checked against those that it conflicts with."""
        access = _Access(launch, before.get(launch.lane, 0) + 1)
        for start, stop in launch.reads:
            for span in self._spans[self._cut(start, stop)]:
                _check_behind(span, [span.write], access, before, "writes")
                span.reads[launch.lane] = access
        for start, stop in launch.writes:
            place = self._cut(start, stop)
            for span in self._spans[place]:
                _check_behind(span, [span.write], access, before, "writes")
                _check_behind(span, list(span.reads.values()), access, before, "reads")
            self._spans[place] = [_Span(start, stop, access)] if start < stop else []

    def _cut(self, start: int, stop: int) -> slice:
        """Where the spans are that cover exactly these bytes; those that nobody touched yet become spans."""
        if start >= stop:
            return slice(0, 0)
        self._split(start)
        self._split(stop)
        place = slice(self._index(start), self._index(stop))
        covered: list[_Span] = []
        for span in self._spans[place]:
            covered += [_Span(start, span.start)] if start < span.start else []
            covered.append(span)
            start = span.stop
        covered += [_Span(start, stop)] if start < stop else []
        self._spans[place] = covered
        return slice(place.start, place.start + len(covered))

    def _split(self, address: int) -> None:
        """Make one span end, and another begin, at an address inside of a span."""
        index = self._index(address)
        if index and (span := self._spans[index - 1]).stop > address:
            self._spans.insert(index, replace(span, start=address, reads=dict(span.reads)))
            span.stop = address

    def _index(self, address: int) -> int:
        return bisect_left(self._spans, address, key=lambda span: span.start)


def _check_behind(
    span: _Span, earlier: Sequence[_Access | None], access: _Access, before: Clock, did: Literal["reads", "writes"]
) -> None:
    launch = access.launch
    for other in (e.launch for e in earlier if e is not None and not e.is_behind(before)):
        if other is launch:
            continue  # an op that updates in place, or names the same bytes twice
        raise LaneRaceError(
            f"{other.name} on lane {other.lane} {did} bytes {span.start:#x} to {span.stop:#x}, which {launch.name} on "
            f"lane {launch.lane} touches as well, and nothing orders the two: record an event on lane {other.lane} "
            f"after {other.name} and let lane {launch.lane} wait for it before {launch.name}"
        )
