"""Where in the arena each slot of a bucket lies, and the arenas.

Placement is greedy by size: the largest slot first, each at the lowest offset where it meets no slot that is alive at
the same time. An independent check goes over the program unit by unit and compares neighbours, so a fault of the
placement cannot hide in its own idea of overlap.

Note "an arena never moves": captured pieces hold its addresses. Where the largest bucket is known there is one arena,
made for it before the first capture, and locked. Otherwise arenas grow in generations: a bucket that does not fit opens
one of max(need, 2 x last), and every bucket captured so far keeps the one it was captured with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..compat import may_overlap_itself
from ..draft import Slot, TensorMeta
from ..errors import PlanError
from .engine import ALIGNMENT, Engine
from .sizes import Sizes, bytes_needed


@dataclass(frozen=True, slots=True)
class Request:
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
    placement = place(requests)
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


def _requests(slots: Sequence[Slot], sizes: Sizes) -> list[Request]:
    return [Request(aligned(extent_bytes(slot.meta, sizes)), slot.first, slot.last) for slot in slots]


def place(requests: Sequence[Request]) -> Placement:
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


def _lowest_offset(request: Request, placed: Sequence[tuple[int, Request]]) -> int:
    offset = 0
    taken = sorted((o, o + r.nbytes) for o, r in placed if r.first <= request.last and request.first <= r.last)
    for start, end in taken:
        if offset + request.nbytes <= start:
            break
        offset = max(offset, end)
    return offset


def _largest_live_sum(requests: Sequence[Request]) -> int:
    starts = {request.first for request in requests}
    return max((sum(r.nbytes for r in requests if r.first <= unit <= r.last) for unit in starts), default=0)


def check_placement(requests: Sequence[Request], placement: Placement) -> None:
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
    """Bytes from the first to behind the last element of a layout."""
    return bytes_needed(sizes.all_of(meta.shape), sizes.all_of(meta.stride), meta.dtype.itemsize)


def aligned(nbytes: int) -> int:
    """The next multiple of 256."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def slot_tensor(arena: Tensor, offset: int, meta: TensorMeta, sizes: Sizes) -> Tensor:
    """The tensor of a slot at a byte offset of an arena (uint8, aligned to 256 bytes)."""
    nbytes = extent_bytes(meta, sizes)
    flat = arena[offset : offset + nbytes].view(meta.dtype)
    return flat.as_strided(sizes.all_of(meta.shape), sizes.all_of(meta.stride))


def copier(target: Tensor) -> Callable[[Tensor], object]:
    """What copies a tensor of the same layout into `target`.

    Where elements share memory (an expanded tensor, overlapping windows) torch refuses to write them one by one, so
    the memory from the first to the last is copied as it lies.
    """
    return partial(_copy_extent, target) if may_overlap_itself(target) else target.copy_


def _copy_extent(target: Tensor, source: Tensor) -> None:
    extent_of(target).copy_(extent_of(source))


def extent_of(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, as it lies."""
    return tensor.as_strided((bytes_needed(tensor.size(), tensor.stride(), 1),), (1,))


class Arenas:
    """The arenas of one compiled graph; its lock is that of the graph's captures.

    Args:
        engine: who allocates.
        device: where.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._last: Tensor | None = None

    def locked_at(self, nbytes: int) -> Tensor:
        """The one arena, made at the first call and never again."""
        if self._last is None:
            self._last = self._engine.allocate(nbytes, self._device)
        return self._last

    def fit(self, nbytes: int) -> Tensor:
        """An arena of at least that many bytes: the last one, or a new generation."""
        if self._last is None or self._last.numel() < nbytes:
            last = 0 if self._last is None else self._last.numel()
            self._last = self._engine.allocate(max(nbytes, 2 * last), self._device)
        return self._last
