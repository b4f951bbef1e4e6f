"""From what launches wait for to the log that a host engine would keep, and to what has run before each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsv4_compile.analysis.stream_schedule import START, Events
from dsv4_compile.runtime.engines.host.race_checker import LogEntry, RecordEvent, StreamLaunch, WaitEvent


def log_of(
    launches: Sequence[StreamLaunch], waits: Sequence[Collection[int]], joins: Collection[int]
) -> list[LogEntry]:
    """The log in program order; launches are known by their place, and so is the event recorded after one.

    `START` stands for an event recorded on stream 0 before all launches.
    """
    awaited = set().union(*waits, joins)
    log: list[LogEntry] = [RecordEvent(stream=0, event=START)] if START in awaited else []
    for place, (launch, wanted) in enumerate(zip(launches, waits, strict=True)):
        log += [WaitEvent(stream=launch.stream, event=event) for event in sorted(wanted)]
        log.append(launch)
        log += [RecordEvent(stream=launch.stream, event=place)] if place in awaited else []
    return log + [WaitEvent(stream=0, event=event) for event in sorted(joins)]


def happens_before(streams: Sequence[int], events: Events) -> list[set[int]]:
    """By op, all that has run before it for certain: what is before it on its stream, what it waits for, and so on."""
    past: list[set[int]] = []
    for op, stream in enumerate(streams):
        direct = {*(other for other in range(op) if streams[other] == stream), *events.waits[op]} - {START}
        past.append(direct.union(*(past[other] for other in direct)))
    return past
