"""The programs of one compiled graph, by key; each goes when a parameter or buffer that it was captured with dies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .keys import Key, OverlapCheck
from .program import Program

Anchors = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A captured bucket.

    Attributes:
        program: what replays it.
        overlap: notices calls in which a written input overlaps another.
        bucket: sizes and host scalars.
        anchors: addresses of the parameters and buffers it was captured with.
    """

    program: Program
    overlap: OverlapCheck
    bucket: tuple[object, ...]
    anchors: Anchors


class Entries:
    """Maps keys to entries. Changes are made under the lock of the callable, except that a finaliser may drop entries
    at any time: dropping one takes a single dictionary operation, and whoever runs its program holds it."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._references: dict[Key, list[weakref.ref[Tensor]]] = {}

    def get(self, key: Key) -> Entry | None:
        """The entry of a key."""
        return self._entries.get(key)

    def all(self) -> list[Entry]:
        """Every entry."""
        return list(self._entries.values())

    def add(self, key: Key, entry: Entry, owned: Sequence[Tensor]) -> None:
        """Keep an entry for as long as all of `owned` live."""
        entries = self._entries

        def forget(_: object) -> None:
            entries.pop(key, None)

        self._references[key] = [weakref.ref(tensor, forget) for tensor in owned]
        entries[key] = entry

    def count(self, anchors: Anchors) -> int:
        """How many buckets are captured with these parameters and buffers."""
        return sum(entry.anchors == anchors for entry in self.all())

    def drop_stale(self, bucket: tuple[object, ...], anchors: Anchors) -> bool:
        """Drop entries whose parameters moved or died, and one that this bucket's new capture replaces.

        Returns:
            Whether the bucket had been captured before, with addresses that no longer hold.
        """
        stale = [key for key, entry in list(self._entries.items()) if self._has_moved(key, entry)]
        stale += [
            key for key, entry in list(self._entries.items()) if (entry.bucket, entry.anchors) == (bucket, anchors)
        ]
        dropped = self._drop(stale)
        return any(entry.bucket == bucket for entry in dropped)

    def clear(self) -> None:
        """Drop all."""
        self._drop(list(self._entries))

    def _has_moved(self, key: Key, entry: Entry) -> bool:
        tensors = [reference() for reference in self._references.get(key, [])]
        return any(
            tensor is None or tensor.data_ptr() != address
            for tensor, address in zip(tensors, entry.anchors, strict=True)
        )

    def _drop(self, keys: Iterable[Key]) -> list[Entry]:
        dropped = []
        for key in keys:
            self._references.pop(key, None)
            entry = self._entries.pop(key, None)
            if entry is not None:
                dropped.append(entry)
        return dropped
