"""Graph memory pools of torch for the cuda engine.

torch refuses a capture into a pool whose graphs are all gone, so a pool takes another handle then.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .cuda import CudaRecording


class CudaPool:
    """A graph memory pool of torch; its memory is freed with the last graph that uses it.

    Attributes:
        handle: of the pool that the next capture uses.
        recordings: the ones in it, as long as they live.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Give the captures to come another pool."""
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.recordings: weakref.WeakSet[CudaRecording] = weakref.WeakSet()

    def join(self) -> list[CudaRecording]:
        """The recordings that the next capture shares the pool with; one of them has to live when it begins."""
        recordings = list(self.recordings)
        if not recordings:
            self.renew()
        return recordings
