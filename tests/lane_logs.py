"""From what launches wait for to the log that a host engine would keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsv4_compile.lane_schedule import START
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
