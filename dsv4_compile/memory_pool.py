"""Memory that several compiled models share, such as a model and the one that drafts for it.

Each captured graph has addresses of a workspace and of temporaries for ever, and uses them only while it replays. Two
models that never run at the same time can have the same: `options={"pool": pool}` with one `MemoryPool` for both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Made = TypeVar("Made")


class MemoryPool:
    """Makes compiled models share one workspace and one pool of temporaries on each device: a value of `pool`.

    They serve one call at a time, all together: a call that comes while another one is served, from another thread or
    from inside of it, runs uncaptured in memory of its own, and is counted so. Capture the larger model first: an arena
    never grows, so a workspace that does not fit in the one there is opens a second. The memory goes with the last of
    the models that use it, and `torch._dynamo.reset()` frees it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What was made for a key by the first who asked; it lives as long as somebody has it."""
        with self._lock:
            made: Made | None = self._made.get(key)
            if made is None:
                self._made[key] = made = make()
            return made
