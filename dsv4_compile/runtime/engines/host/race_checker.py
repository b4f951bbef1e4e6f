"""The happens-before checker of the host engine: side streams must be ordered by events, not by luck.

A host runs launches one after another, so a missing event never shows in its numbers. Two things take the luck away.
`check_races` follows a log with one vector clock a stream: an access must come after every earlier one that it
conflicts with, by stream order and events alone. `shuffled` gives the launches in another order that the events allow.

    stream 0:  gemm, RecordEvent(0), norm, ..., WaitEvent(1)        stream 1:  WaitEvent(0), side gemm, RecordEvent(1)

A side stream begins with a wait for something of stream 0 (the fork), and in the end stream 0 waits for it (the join),
so that nothing of a piece overlaps what runs before or after the piece.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ....errors import StreamRaceError

ByteRange = tuple[int, int]  # first address, address after the last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamLaunch:
    """One kernel on a stream; compared by identity, so that two launches of one op are two.

    Attributes:
        name: shown in errors.
        stream: 0 for the main stream, side streams from 1.
        reads, writes: ranges of addresses; an empty range touches nothing.
    """

    name: str
    stream: int
    reads: tuple[ByteRange, ...] = ()
    writes: tuple[ByteRange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """The event stands for all that its stream was given so far; recorded again, it stands for more."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEvent:
    """What its stream is given from here on runs after what the event stands for at this place in the log."""

    stream: int
    event: int


LogEntry = StreamLaunch | RecordEvent | WaitEvent
Clock = dict[
    int, int
]  # stream -> how many of its launches have run for certain; stream 0 is in it once forked from there


def check_races(log: Sequence[LogEntry]) -> None:
    """Check the log of one piece, its entries in the order in which the host issued them.

    Raises:
        StreamRaceError: two launches conflict and are unordered; a side stream is not forked from stream 0, or not
            joined into it by the end; a wait for an event that was not recorded before.
    """
    clocks = _start()
    last: dict[int, StreamLaunch] = {}
    memory = _Memory()
    for launch, before in _launches(log, clocks):
        if 0 not in before:
            raise StreamRaceError(
                f"{launch.name} runs on stream {launch.stream}, which is not forked from stream 0: record an event on "
                f"stream 0 and let stream {launch.stream} wait for it before its first launch"
            )
        memory.touch(launch, before)
        last[launch.stream] = launch
    _check_joined(clocks, last)


def shuffled(log: Sequence[LogEntry], seed: int) -> tuple[StreamLaunch, ...]:
    """The launches in a random order that streams and events allow; equal seeds give equal orders.

    Each time, one of the launches that may come next is chosen, all with the same chance.

    Raises:
        StreamRaceError: a wait for an event that was not recorded before.
    """
    draw = random.Random(seed)
    queues: dict[int, deque[tuple[StreamLaunch, Clock]]] = {}
    for launch, before in _launches(log, _start()):
        queues.setdefault(launch.stream, deque()).append((launch, before))
    done: Counter[int] = Counter()
    order: list[StreamLaunch] = []
    # the first launch of the log that has not run is always ready, so this ends with all of them
    while ready := [stream for stream, queue in sorted(queues.items()) if queue and _has_run(queue[0][1], done)]:
        stream = draw.choice(ready)
        order.append(queues[stream].popleft()[0])
        done[stream] += 1
    return tuple(order)


def _start() -> dict[int, Clock]:
    return {0: {0: 0}}


def _launches(log: Sequence[LogEntry], clocks: dict[int, Clock]) -> Iterator[tuple[StreamLaunch, Clock]]:
    """Each launch with what has run before it for certain; `clocks` follows, by stream."""
    events: dict[int, Clock] = {}
    for entry in log:
        clock = clocks.setdefault(entry.stream, {})
        if isinstance(entry, RecordEvent):
            events[entry.event] = dict(clock)
        elif isinstance(entry, StreamLaunch):
            yield entry, dict(clock)
            clock[entry.stream] = clock.get(entry.stream, 0) + 1
        elif entry.event in events:
            for stream, count in events[entry.event].items():
                clock[stream] = max(count, clock.get(stream, 0))
        else:
            raise StreamRaceError(
                f"stream {entry.stream} waits for event {entry.event}, which was not recorded before: record it first, "
                "on the stream that is to be waited for"
            )


def _has_run(wanted: Clock, done: Mapping[int, int]) -> bool:
    return all(done[stream] >= count for stream, count in wanted.items())


def _check_joined(clocks: Mapping[int, Clock], last: Mapping[int, StreamLaunch]) -> None:
    for stream, launch in sorted(last.items()):
        if clocks[0].get(stream, 0) < clocks[stream][stream]:
            raise StreamRaceError(
                f"stream {stream} is not joined into stream 0: {launch.name} may still run when the piece has "
                f"ended; record an event on stream {stream} after it and let stream 0 wait for it"
            )


@dataclass(frozen=True, slots=True)
class _Access:
    launch: StreamLaunch
    number: int  # among the launches of its stream, from 1

    def comes_after(self, before: Clock) -> bool:
        return before.get(self.launch.stream, 0) >= self.number


@dataclass(slots=True)
class _Span:
    """Bytes that were touched by the same launches: the last one that wrote them, and by stream the last to read."""

    start: int
    stop: int
    write: _Access | None = None
    reads: dict[int, _Access] = field(default_factory=dict)


class _Memory:
    """Who touched which bytes last: disjoint spans in order of address.

    Older accesses may be forgotten: one of those kept comes after them (or that pair was refused), so what is ordered
    after the kept ones is ordered after all.
    """

    def __init__(self) -> None:
        self._spans: list[_Span] = []

    def touch(self, launch: StreamLaunch, before: Clock) -> None:
        """Note the accesses of a launch, each checked against those that it conflicts with."""
        access = _Access(launch, before.get(launch.stream, 0) + 1)
        for start, stop in launch.reads:
            for span in self._spans[self._cut(start, stop)]:
                _check_after(span, [span.write], access, before, "writes")
                span.reads[launch.stream] = access
        for start, stop in launch.writes:
            place = self._cut(start, stop)
            for span in self._spans[place]:
                _check_after(span, [span.write], access, before, "writes")
                _check_after(span, list(span.reads.values()), access, before, "reads")
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


def _check_after(
    span: _Span, earlier: Sequence[_Access | None], access: _Access, before: Clock, did: Literal["reads", "writes"]
) -> None:
    launch = access.launch
    for other in (e.launch for e in earlier if e is not None and not e.comes_after(before)):
        if other is launch:
            continue  # an op that updates in place, or names the same bytes twice
        raise StreamRaceError(
            f"{other.name} on stream {other.stream} {did} bytes {span.start:#x} to {span.stop:#x}, which {launch.name} "
            f"on stream {launch.stream} touches as well, and nothing orders the two: record an event on stream "
            f"{other.stream} after {other.name} and let stream {launch.stream} wait for it before {launch.name}"
        )
