"""The memory that one call at a time uses: of one compiled graph, or of several that share a `MemoryPool`."""

from __future__ import annotations

import torch

from ...memory_pool import MemoryPool
from ..engines.base import Engine, Pool
from .arena import Arenas


class CallMemory:
    """Arenas and a pool of temporaries, and the mark of who uses them.

    Args:
        engine: who allocates.
        device: where.
        is_shared: several compiled graphs use it.

    Attributes:
        serving: the call that uses the memory, under "call".
        arenas, pool: what captures use from now on.
    """

    arenas: Arenas
    pool: Pool

    def __init__(self, engine: Engine, device: torch.device, *, is_shared: bool) -> None:
        self._engine = engine
        self._device = device
        self.is_shared = is_shared
        self.serving: dict[str, object] = {}
        self.renew()

    def renew(self) -> None:
        """Let go of arenas and pool; captured graphs that have them keep them."""
        self.arenas = Arenas(self._engine, self._device)
        self.pool = self._engine.make_pool()


def memory_for(pool: object, engine: Engine, device: torch.device) -> CallMemory:
    """The memory of a compiled graph: that of the `MemoryPool` in its options, or its own."""
    if isinstance(pool, MemoryPool):
        return pool.get((engine, device), lambda: CallMemory(engine, device, is_shared=True))
    return CallMemory(engine, device, is_shared=False)
