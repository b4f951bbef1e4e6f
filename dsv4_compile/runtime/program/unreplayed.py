"""Notices sizes and numbers that never come back, so that each capture of one is wasted.

A cache that grows with every step, or a position that the model gets as an integer, makes a bucket of each call. If
such calls are made twice, all of them are captured, and none is replayed. So captures are watched: once several in a
row were of buckets that have not come back, what was another in each of them is named, and new values of it are not
captured any more. What was captured stays, and so does what is captured ahead, on demand; or by hand, with two calls of
each size one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...log import log
from .cache import Bucket

# Captures in a row without one replay after them.
MOST = 8


class Unreplayed:
    """The captures of one compiled graph that were not replayed yet.

    Attributes:
        streak: the last buckets that were captured, if none of them came back; with their token counts where the
            options list those.
    """

    def __init__(self) -> None:
        self.streak: dict[Bucket, int | None] = {}
        self._warmed: Bucket | None = None
        self._values: dict[int, set[object]] = {}  # by the place in the bucket, those that may be captured

    def excludes(self, bucket: Bucket) -> bool:
        """Whether a bucket has a new value of what keeps changing, and is not to be captured."""
        return any(bucket[place] not in values for place, values in self._values.items())

    def note_warm_up(self, bucket: Bucket) -> None:
        """A bucket is met for the first time."""
        self._warmed = bucket

    def note_replay(self, bucket: Bucket) -> None:
        """A bucket came back."""
        if bucket in self.streak:
            self.streak.clear()

    def note_capture(
        self, bucket: Bucket, listed: int | None, captured: Iterable[Bucket], names: Callable[[], Sequence[str]]
    ) -> None:
        """A bucket was captured.

        Args:
            bucket: it.
            listed: its token count, if the options list those that are to be captured.
            captured: all that are, with this one.
            names: of what a bucket consists of, as the user reaches it.
        """
        if bucket == self._warmed:
            return  # it came back at once
        self.streak[bucket] = listed
        if len(self.streak) < MOST:
            return
        if None not in self.streak.values() and len(set(self.streak.values())) == MOST:
            del self.streak[next(iter(self.streak))]  # each has another token count, and all were asked for
            return
        buckets = list(captured)
        places = self._changing()
        for place in places:
            self._values[place] = {other[place] for other in buckets}
        named = names()
        changing = ", ".join(named[place] for place in places)
        log.warning(
            "the last %d captures were never replayed: each has another %s. Calls with new values of it run uncaptured "
            "from now on; keep it as it is, pad it, or capture what comes back with dsv4_compile.capture",
            MOST,
            changing,
        )
        self.streak.clear()

    def _changing(self) -> list[int]:
        """The places in the bucket that had the most values."""
        counts = [len(set(values)) for values in zip(*self.streak, strict=True)]
        return [place for place, count in enumerate(counts) if count == max(counts)]
