"""The arenas of a compiled graph, and the tensors of slots in them.

Note "an arena never moves": captured pieces hold its addresses. Where the largest bucket is known there is one arena,
made for it before the first capture, and locked. Otherwise arenas grow in generations: a bucket that does not fit opens
one of max(need, 2 x last), and every bucket captured so far keeps the one it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...analysis.sizes import Sizes, bytes_needed
from ...analysis.slot_placement import extent_bytes
from ...compat.dispatch import may_overlap_itself, with_lazy_bits
from ...graph.traced import TensorMeta
from ..engines.base import Engine


def slot_tensor(arena: Tensor, offset: int, meta: TensorMeta, sizes: Sizes) -> Tensor:
    """The tensor of a slot at a byte offset of an arena (uint8, aligned to 256 bytes)."""
    nbytes = extent_bytes(meta, sizes)
    flat = arena[offset : offset + nbytes].view(meta.dtype)
    plain = flat.as_strided(sizes.all_of(meta.shape), sizes.all_of(meta.stride))
    return with_lazy_bits(plain, conj=meta.conj, neg=meta.neg)


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
    """The arenas of a compiled graph, or of several; their lock is that of the captures in them.

    Args:
        engine: who allocates.
        device: where.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine = engine
        self._device = device
        self._last: Tensor | None = None

    def locked_at(self, nbytes: int) -> Tensor:
        """The one arena; one more where graphs or slots without a bound that share it need more (see `fit`)."""
        if self._last is None or self._last.numel() < nbytes:
            self._last = self._engine.allocate(nbytes, self._device)
        return self._last

    def fit(self, nbytes: int) -> Tensor:
        """An arena of at least that many bytes: the last one, or a new generation."""
        if self._last is None or self._last.numel() < nbytes:
            last = 0 if self._last is None else self._last.numel()
            self._last = self._engine.allocate(max(nbytes, 2 * last), self._device)
        return self._last
