"""Graph memory pools of torch for the cuda engine.

torch refuses a capture into a pool whose graphs are all gone, so a pool takes another handle then.
"""

from __future__ import annotations

import weakref

import torch

from ....compat.cuda import PoolHandle


class CudaPool:
    """A graph memory pool of torch; its memory is freed with the last graph that uses it.

    Attributes:
        handle: of the pool that the next capture uses.
        graphs: the captured graphs in it, as long as they live.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Give the captures to come another pool."""
        self.handle: PoolHandle = torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[object] = weakref.WeakSet()

    def join(self) -> list[object]:
        """The captured graphs that the next capture shares the pool with; one has to live when it begins."""
        graphs = list(self.graphs)
        if not graphs:
            self.renew()
        return graphs
