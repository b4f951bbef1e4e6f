"""From what launches wait for to the log that a host engine would keep, and to what has run before each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsv4_compile.lane_schedule import START, Events
from dsv4_compile.runtime.host_lanes import Entry, LaneLaunch, Record, Wait


def log_of(launches: Sequence[LaneLaunch], waits: Sequence[Collection[int]], joins: Collection[int]) -> list[Entry]:
    """The log in program order; launches are known by their place, and so is the event recorded behind one.

    `START` stands for an event recorded on lane 0 before all launches.
    """
    awaited = set().union(*waits, joins)
    log: list[Entry] = [Record(lane=0, event=START)] if START in awaited else []
    for place, (launch, wanted) in enumerate(zip(launches, waits, strict=True)):
        log += [Wait(lane=launch.lane, event=event) for event in sorted(wanted)]
        log.append(launch)
        log += [Record(lane=launch.lane, event=place)] if place in awaited else []
    return log + [Wait(lane=0, event=event) for event in sorted(joins)]


def happens_before(lanes: Sequence[int], events: Events) -> list[set[int]]:
    """By op, all that has run before it for certain: what is before it on its lane, what it waits for, and so on."""
    past: list[set[int]] = []
    for op, lane in enumerate(lanes):
        direct = {*(other for other in range(op) if lanes[other] == lane), *events.waits[op]} - {START}
        past.append(direct.union(*(past[other] for other in direct)))
    return past
