"""Memory of the host engine's temporaries, reused as a CUDA graph pool reuses it.

A block is a piece of memory. While a capture records, each new tensor *leases* a block: it gets a torch storage of
its own over the block's memory, made from a memoryview that torch drops together with the storage. So a lease has
ended exactly when that memoryview is gone, whoever held views of the tensor: Python, torch or an autograd graph.
Then the block may be leased again, in the same or a later capture, and is poisoned first.

What a captured graph keeps for its replays is not the leased storage but an alias over the block's own one, so a
recording that still writes to a block at replay does not keep its lease alive. That is the hazard of shared pools,
and it is reproduced on purpose.

A pool holds its blocks weakly. They live through the captured graphs that use them, and go with the last of these.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ....analysis.slot_placement import ALIGNMENT
from ....compat.dispatch import with_lazy_bits_of
from ..base import POISON


class Lease:
    """One use of a block by one new tensor and its views.

    Attributes:
        nbytes: size of the tensor.
    """

    def __init__(self, view: memoryview, nbytes: int) -> None:
        self.nbytes = nbytes
        self._view = weakref.ref(view)

    def has_ended(self) -> bool:
        """Nothing but captured graphs refers to the memory."""
        return self._view() is None


class PoolBlock:
    """Memory with an address that does not change, and the stream that uses it.

    What is free for a stream may still be in use on another one, which is late.
    """

    def __init__(self, nbytes: int, stream: int = 0) -> None:
        self.stream = stream
        self._buffer = bytearray(nbytes + ALIGNMENT)
        self._start = -torch.frombuffer(self._buffer, dtype=torch.uint8).data_ptr() % ALIGNMENT
        self._memory = torch.frombuffer(self._buffer, dtype=torch.uint8, offset=self._start, count=nbytes)
        self.nbytes = nbytes
        self.address = self._memory.data_ptr()
        self.lease: Lease | None = None

    def is_view(self) -> bool:
        """It may be leased."""
        return self.lease is None or self.lease.has_ended()

    def start_lease(self, nbytes: int) -> torch.UntypedStorage:
        """Poison the memory and begin a lease of `nbytes`, which lasts as long as the returned storage."""
        self.poison()
        view = memoryview(self._buffer)
        self.lease = Lease(view, nbytes)
        return torch.frombuffer(view, dtype=torch.uint8, offset=self._start, count=self.nbytes).untyped_storage()

    def poison(self) -> None:
        """Overwrite what a former lease left."""
        self._memory.view(torch.int16).fill_(POISON)

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor like `tensor`, over the block's own storage."""
        alias = tensor_in(self._memory.untyped_storage(), tensor, int(tensor.storage_offset()))
        return with_lazy_bits_of(tensor, alias)


class HostPool:
    """Blocks that captures share; only touched under the capture lock."""

    def __init__(self) -> None:
        self._blocks: weakref.WeakValueDictionary[int, PoolBlock] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """How much memory the living captured graphs of this pool hold."""
        return sum(block.nbytes for block in self._blocks.values())

    def take(self, nbytes: int, stream: int = 0) -> PoolBlock:
        """A free block of at least this size, the smallest there is, or a new one; a stream reuses only its own."""
        rounded = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        own = (block for block in self._blocks.values() if block.stream == stream and block.nbytes >= rounded)
        fitting = [block for block in own if self.is_reusable(block)]
        if fitting:
            return min(fitting, key=lambda block: block.nbytes)
        block = PoolBlock(rounded, stream)
        self._blocks[block.address] = block
        return block

    def is_reusable(self, block: PoolBlock) -> bool:
        """Whether a block may be handed out."""
        return block.is_view()

    def block_of(self, tensor: Tensor) -> PoolBlock | None:
        """The block that a tensor was leased from, None if its memory is not this pool's."""
        return self._blocks.get(tensor.untyped_storage().data_ptr())


def tensor_in(storage: torch.UntypedStorage, like: Tensor, offset: int) -> Tensor:
    """A tensor of the size, strides and dtype of `like` in a storage; `offset` counts elements."""
    return torch.empty(0, dtype=like.dtype).set_(storage, offset, like.size(), like.stride())
