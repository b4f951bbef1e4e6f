"""Where in the arena each slot of a bucket lies.

Placement is greedy by size: the largest slot first, each at the lowest offset where it meets no slot that is alive at
the same time. An independent check goes over the program unit by unit and compares neighbours, so a fault of the
placement cannot hide in its own idea of overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlanError
from ..graph.partitioned import Slot
from ..graph.traced import TensorMeta
from .sizes import Sizes, bytes_needed

ALIGNMENT = 256  # bytes; what CUDA's allocator aligns to, and enough for any vector load


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Bytes of one slot, and the first and last unit in which they are in use."""

    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets in bytes, in the order of the requests, and how good they are.

    Attributes:
        offsets: multiples of 256.
        planned: bytes of an arena that holds all.
        lower_bound: the largest sum of bytes alive at once; no placement needs fewer.
        unshared: bytes if no two slots shared any.
    """

    offsets: tuple[int, ...]
    planned: int
    lower_bound: int
    unshared: int


def place_slots(slots: Sequence[Slot], sizes: Sizes) -> Placement:
    """Place the slots of a bucket and check the result.

    Raises:
        PlanError: two slots alive at the same time would share a byte; a fault of this module.
    """
    requests = _requests(slots, sizes)
    placement = place_requests(requests)
    check_placement(requests, placement)
    return placement


def reuse_placement(slots: Sequence[Slot], sizes: Sizes, larger: Placement) -> Placement:
    """The offsets of a larger bucket for a smaller one, checked as its own would be.

    Raises:
        PlanError: some slot is larger in the smaller bucket.
    """
    requests = _requests(slots, sizes)
    unshared = sum(request.nbytes for request in requests)
    placement = Placement(larger.offsets, larger.planned, _largest_live_sum(requests), unshared)
    check_placement(requests, placement)
    return placement


def _requests(slots: Sequence[Slot], sizes: Sizes) -> list[SlotRequest]:
    return [SlotRequest(aligned(extent_bytes(slot.meta, sizes)), slot.first, slot.last) for slot in slots]


def place_requests(requests: Sequence[SlotRequest]) -> Placement:
    """Greedy by size, largest first; ties by program order."""
    order = sorted(range(len(requests)), key=lambda index: (-requests[index].nbytes, requests[index].first, index))
    offsets: dict[int, int] = {}
    for index in order:
        offsets[index] = _lowest_offset(requests[index], [(offsets[i], requests[i]) for i in offsets])
    ends = [offset + requests[index].nbytes for index, offset in offsets.items()]
    return Placement(
        offsets=tuple(offsets[index] for index in range(len(requests))),
        planned=max(ends, default=0),
        lower_bound=_largest_live_sum(requests),
        unshared=sum(request.nbytes for request in requests),
    )


def _lowest_offset(request: SlotRequest, placed: Sequence[tuple[int, SlotRequest]]) -> int:
    offset = 0
    taken = sorted((o, o + r.nbytes) for o, r in placed if r.first <= request.last and request.first <= r.last)
    for start, end in taken:
        if offset + request.nbytes <= start:
            break
        offset = max(offset, end)
    return offset


def _largest_live_sum(requests: Sequence[SlotRequest]) -> int:
    starts = {request.first for request in requests}
    return max((sum(r.nbytes for r in requests if r.first <= unit <= r.last) for unit in starts), default=0)


def check_placement(requests: Sequence[SlotRequest], placement: Placement) -> None:
    """Raise PlanError unless, in every unit, the slots alive there are disjoint, aligned and inside the arena."""
    units = {unit for request in requests for unit in (request.first, request.last)}
    for unit in units:
        alive = sorted(
            (offset, offset + request.nbytes)
            for offset, request in zip(placement.offsets, requests, strict=True)
            if request.first <= unit <= request.last and request.nbytes
        )
        for (_, end), (next_start, _) in itertools.pairwise(alive):
            if end > next_start:
                raise PlanError(f"workspace: in unit {unit}, bytes up to {end} and from {next_start} are both in use")
        if any(start % ALIGNMENT or end > placement.planned for start, end in alive):
            raise PlanError(f"workspace: a slot of unit {unit} is not aligned or outside of the arena")


def extent_bytes(meta: TensorMeta, sizes: Sizes) -> int:
    """Bytes from the first to after the last element of a layout."""
    return bytes_needed(sizes.all_of(meta.shape), sizes.all_of(meta.stride), meta.dtype.itemsize)


def aligned(nbytes: int) -> int:
    """The next multiple of 256."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
