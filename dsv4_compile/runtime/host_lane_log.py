"""The lanes of the host engine: a log of what each lane was given, which is checked before anything is replayed.

One thread runs all lanes, so what is unordered would still come out right. The checker (`host_lanes`) sees it all the
same, and a seed lets replays take any other order that the events allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from .aliasing import byte_range
from .host_lanes import ByteRange, Entry, LaneLaunch, Record, Wait, check_races, shuffled
from .host_launch import AnyLaunch, Operand


class HostLanes:
    """See `capture_state.Lanes`; belongs to one recording.

    Args:
        seed: of the order of replays; None for the order of recording.

    Attributes:
        current: the lane that work goes to.
    """

    def __init__(self, seed: int | None) -> None:
        self.current = 0
        self._seed = seed
        self._log: list[AnyLaunch | Record | Wait] = []
        self._lane_of: dict[int, int] = {}
        self._events = itertools.count()

    @contextmanager
    def on(self, lane: int) -> Iterator[None]:
        """See `Lanes.on`."""
        self.current, before = lane, self.current
        try:
            yield
        finally:
            self.current = before

    def record(self, lane: int) -> int:
        """See `Lanes.record`."""
        event = next(self._events)
        self._log.append(Record(lane=lane, event=event))
        return event

    def wait(self, lane: int, event: object) -> None:
        """See `Lanes.wait`."""
        assert isinstance(event, int), "an event of this object"
        self._log.append(Wait(lane=lane, event=event))

    def add(self, launch: AnyLaunch) -> None:
        """Give a launch to the current lane."""
        self._log.append(launch)
        self._lane_of[id(launch)] = self.current

    def clear(self) -> None:
        """Forget all."""
        self._log.clear()

    @property
    def are_used(self) -> bool:
        """Whether a side lane was given work."""
        return any(self._lane_of.values())

    def checked_order(self) -> list[AnyLaunch]:
        """The launches in the order of the replays.

        Raises:
            LaneRaceError: some order that the events allow would give other results.
        """
        launches: dict[int, AnyLaunch] = {}
        log: list[Entry] = []
        for entry in self._log:
            if isinstance(entry, (Record, Wait)):
                log.append(entry)
                continue
            lane_launch = _accesses(entry, self._lane_of[id(entry)])
            launches[id(lane_launch)] = entry
            log.append(lane_launch)
        check_races(log)
        if self._seed is None:
            return list(launches.values())
        return [launches[id(lane_launch)] for lane_launch in shuffled(log, self._seed)]


def _accesses(launch: AnyLaunch, lane: int) -> LaneLaunch:
    written = launch.written_operands()
    read = [operand for operand in launch.operands if not any(operand is other for other in written)]
    return LaneLaunch(name=launch.name, lane=lane, reads=_ranges(read), writes=_ranges(written))


def _ranges(operands: list[Operand]) -> tuple[ByteRange, ...]:
    return tuple(byte_range(operand.tensor) for operand in operands)
