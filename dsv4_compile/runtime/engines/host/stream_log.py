"""The streams of the host engine: a log of what each stream was given, which is checked before anything is replayed.

One thread runs all streams, so what is unordered would still come out right. The checker (`race_checker`) sees it all
the same, and a seed lets replays take any other order that the events allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from ....analysis.byte_ranges import byte_range
from .launch import AnyLaunch, Operand
from .race_checker import ByteRange, LogEntry, RecordEvent, StreamLaunch, WaitEvent, check_races, shuffled


class HostStreams:
    """See `capture_state.Streams`; belongs to one captured graph.

    Args:
        seed: of the order of replays; None for the order of recording.

    Attributes:
        current: the stream that work goes to.
    """

    def __init__(self, seed: int | None) -> None:
        self.current = 0
        self._seed = seed
        self._log: list[AnyLaunch | RecordEvent | WaitEvent] = []
        self._stream_of: dict[int, int] = {}
        self._events = itertools.count()

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """See `Streams.on`."""
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def record(self, stream: int) -> int:
        """See `Streams.record`."""
        event = next(self._events)
        self._log.append(RecordEvent(stream=stream, event=event))
        return event

    def wait(self, stream: int, event: object) -> None:
        """See `Streams.wait`."""
        assert isinstance(event, int), "an event of this object"
        self._log.append(WaitEvent(stream=stream, event=event))

    def add(self, launch: AnyLaunch) -> None:
        """Give a launch to the current stream."""
        self._log.append(launch)
        self._stream_of[id(launch)] = self.current

    def clear(self) -> None:
        """Forget all."""
        self._log.clear()

    @property
    def are_used(self) -> bool:
        """Whether a side stream was given work."""
        return any(self._stream_of.values())

    def checked_order(self) -> list[AnyLaunch]:
        """The launches in the order of the replays.

        Raises:
            StreamRaceError: some order that the events allow would give other results.
        """
        launches: dict[int, AnyLaunch] = {}
        log: list[LogEntry] = []
        for entry in self._log:
            if isinstance(entry, (RecordEvent, WaitEvent)):
                log.append(entry)
                continue
            stream_launch = _accesses(entry, self._stream_of[id(entry)])
            launches[id(stream_launch)] = entry
            log.append(stream_launch)
        check_races(log)
        if self._seed is None:
            return list(launches.values())
        return [launches[id(stream_launch)] for stream_launch in shuffled(log, self._seed)]


def _accesses(launch: AnyLaunch, stream: int) -> StreamLaunch:
    written = launch.written_operands()
    read = [operand for operand in launch.operands if not any(operand is other for other in written)]
    return StreamLaunch(name=launch.name, stream=stream, reads=_ranges(read), writes=_ranges(written))


def _ranges(operands: list[Operand]) -> tuple[ByteRange, ...]:
    return tuple(byte_range(operand.tensor) for operand in operands)
