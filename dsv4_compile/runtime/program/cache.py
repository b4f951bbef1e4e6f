"""The programs of one compiled graph, by key; each goes when a parameter or buffer that it was captured with dies."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..memory.overlap import OverlapCheck
from .builder import Program
from .context_addresses import Addresses
from .keys import Key
from .marks import Mark, mark_of

ParameterAddresses = tuple[int, ...]
# For how many sets of addresses a bucket is kept with the same parameters and buffers.
ADDRESS_SETS = 4
# Buckets remembered for `recaptures` after their entries went; host scalars make new ones without end.
STALE_BUCKETS = 1024
Bucket = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CachedProgram:
    """A captured bucket.

    Attributes:
        program: what replays it.
        overlap: notices calls in which a written input overlaps another.
        bucket: sizes and host scalars.
        parameter_addresses: addresses of the parameters and buffers it was captured with.
        context: those of what its ops read through the step context.
    """

    program: Program
    overlap: OverlapCheck
    bucket: Bucket
    parameter_addresses: ParameterAddresses
    context: Addresses = ()


class ProgramCache:
    """Maps keys to entries. Changes are made under the lock of the callable, except that a finaliser may drop entries
    at any time: dropping one takes single dictionary operations, and whoever runs its program holds it."""

    def __init__(self) -> None:
        self._programs: dict[Key, CachedProgram] = {}
        self._marks: dict[Key, list[weakref.ref[Mark]]] = {}
        self._owners: dict[Key, tuple[int, ...]] = {}  # which tensor objects had which of the parameter addresses
        self._stale: dict[Bucket, None] = {}  # in order of age

    def get(self, key: Key) -> CachedProgram | None:
        """The entry of a key."""
        return self._programs.get(key)

    def add(self, key: Key, entry: CachedProgram, owned: Sequence[Tensor]) -> bool:
        """Keep an entry for as long as all of `owned` live.

        Returns:
            Whether its bucket had been captured before, with static inputs that have moved since or are gone.
        """
        this = weakref.ref(self)  # not self: the finaliser would keep all of it alive until the collector comes

        def forget(_: object) -> None:
            owner = this()
            if owner is not None:
                owner._drop(key)

        self._marks[key] = [weakref.ref(mark_of(tensor), forget) for tensor in owned]
        self._owners[key] = tuple(map(id, owned))
        self._programs[key] = entry
        is_again = entry.bucket in self._stale
        self._stale.pop(entry.bucket, None)
        for bucket in list(self._stale)[:-STALE_BUCKETS]:
            self._stale.pop(bucket, None)
        return is_again

    def buckets(self, parameter_addresses: ParameterAddresses | None = None) -> set[Bucket]:
        """The buckets that are captured with these parameters and buffers, or with any."""
        return {
            entry.bucket
            for entry in list(self._programs.values())
            if parameter_addresses in (None, entry.parameter_addresses)
        }

    def drop_moved(self, owned: Sequence[Tensor]) -> None:
        """Drop entries that were captured with one of these parameters and buffers where it is no longer."""
        addresses = {id(tensor): tensor.data_ptr() for tensor in owned}
        for key, entry in list(self._programs.items()):
            if self._has_moved(key, entry, addresses):
                self._drop(key)

    def drop_oldest(self, bucket: Bucket, parameter_addresses: ParameterAddresses) -> list[Key]:
        """Make room for one more entry of a bucket with these parameters and buffers.

        It may have several, with other addresses of its other static inputs: two buffers that are used in turn.

        Returns:
            The keys of those that had to go, which may have been of use still.
        """
        alive = list(self._programs.items())
        others = [
            key for key, entry in alive if (entry.bucket, entry.parameter_addresses) == (bucket, parameter_addresses)
        ]
        if others:
            self._stale[bucket] = None
        dropped = others[: max(0, len(others) + 1 - ADDRESS_SETS)]
        for key in dropped:
            self._drop(key)
        return dropped

    def clear(self) -> None:
        """Drop all."""
        for key in list(self._programs):
            self._drop(key)

    def _has_moved(self, key: Key, entry: CachedProgram, addresses: Mapping[int, int]) -> bool:
        owners = self._owners.get(key)
        if owners is None:
            return True  # a finaliser was here meanwhile
        # a new object in the place of a dead one costs a capture at worst, where somebody else kept the memory
        return any(
            addresses.get(owner, address) != address
            for owner, address in zip(owners, entry.parameter_addresses, strict=True)
        )

    def _drop(self, key: Key) -> None:
        self._marks.pop(key, None)
        self._owners.pop(key, None)
        entry = self._programs.pop(key, None)
        if entry is not None:
            self._stale[entry.bucket] = None
