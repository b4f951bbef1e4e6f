"""What the two plans of a compiled graph share: pieces, and the whole step as one piece.

Their calls take turns, and nothing in the workspace or in the pool outlives a call but in buffers of a bucket. So one
arena does for both, made for the one that needs more, and captures of both may have their temporaries in one pool.
Warm-ups, keys and programs are each plan's own: what has run in pieces has not run as one graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.sizes import Sizes
from ..analysis.slot_placement import place_slots
from ..graph.partitioned import Slot
from .engines.base import Pool
from .memory.arena import Arenas
from .memory.call_memory import CallMemory
from .program.limits import Limits


class GraphMemory:
    """Memory of the captured calls of one compiled graph, and whose turn it is.

    Args:
        memory: of this graph, or of several that share a `MemoryPool`.

    Attributes:
        serving: the call that uses the memory.
    """

    def __init__(self, memory: CallMemory) -> None:
        self._memory = memory
        self.serving = memory.serving
        self._plans: dict[str, tuple[Sequence[Slot], Limits]] = {}
        self._at_largest: int | None = None

    @property
    def arenas(self) -> Arenas:
        """Of the slots."""
        return self._memory.arenas

    @property
    def pool(self) -> Pool:
        """Of temporaries inside of pieces."""
        return self._memory.pool

    def renew(self) -> None:
        """Let go of it; programs that were captured keep what they use."""
        self._memory.renew()

    def renew_own(self) -> None:
        """Let go of it, unless other graphs use it too."""
        if not self._memory.is_shared:
            self._memory.renew()

    def use_for(self, plan: str, slots: Sequence[Slot], limits: Limits) -> None:
        """Note what a plan has in the arena; the one before it of that name goes."""
        self._plans[plan] = slots, limits
        self._at_largest = None

    def bytes_at_largest(self, sizes: Sizes) -> int:
        """The bytes of an arena that holds the largest bucket of either plan, as far as that is known.

        Args:
            sizes: of any call; the largest bucket has its own where slots depend on them.
        """
        if self._at_largest is None:
            known = [(slots, limits.largest(sizes)) for slots, limits in self._plans.values()]
            planned = [place_slots(slots, largest).planned for slots, largest in known if largest is not None]
            self._at_largest = max(planned, default=0)
        return self._at_largest
