"""Blocks of the paged caches: who owns which, and the block tables that say so.

Layers whose caches advance together form a *group* and share one block table. Each group hands out blocks of its own
pool: a block covers `block_size` consecutive tokens of one request. A group with a `window` needs only the last
`window` tokens, so blocks that fall out of it go back to the pool while the request still runs; that is what makes a
sliding-window cache cheap. A request that runs owns a *row* in the table of every group, -1 where it has no block.

All bookkeeping is on the host. Nothing is zeroed when a block changes hands: no index names an entry that its
present owner has not written.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Caches that share block tables.

    Attributes:
        name: what the group is called in arguments and messages.
        block_size: tokens a block covers.
        window: how many of the last tokens are still read; None: all of them.
    """

    name: str
    block_size: int
    window: int | None = None

    def end_block(self, num_tokens: int) -> int:
        """Number of blocks that cover the tokens [0, num_tokens)."""
        return -(-num_tokens // self.block_size)

    def first_block(self, position: int) -> int:
        """The first block that a query at `position`, or any later one, still reads."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks that one request of `num_tokens` needs at once when it runs one token at a time."""
        if self.window is None:
            return self.end_block(num_tokens)
        return min(self.end_block(num_tokens), self.end_block(self.window - 1) + 1)


@dataclass(slots=True)
class _Pool:
    """The free blocks of a group, its table, and the live span [first[row], end[row]) of each row."""

    group: BlockGroup
    num_blocks: int
    table: Tensor
    free: list[int]
    first: list[int]
    end: list[int]

    def tokens_that_fit(self, row: int, start: int) -> int:
        return (self.end[row] + len(self.free)) * self.group.block_size - start

    def extend(self, row: int, num_tokens: int) -> None:
        end = self.end[row]
        wanted = self.group.end_block(num_tokens) - end
        if wanted > 0:
            blocks = [self.free.pop() for _ in range(wanted)]
            self.table[row, end : end + wanted] = torch.tensor(blocks, dtype=torch.int32)
            self.end[row] = end + wanted

    def drop_before(self, row: int, block: int) -> None:
        first, block = self.first[row], min(block, self.end[row])
        if block > first:
            self.free.extend(reversed(self.table[row, first:block].tolist()))
            self.table[row, first:block] = -1
            self.first[row] = block


@dataclass(slots=True)
class BlockAllocator:
    """Block tables of all groups for up to `num_rows` running requests.

    Attributes:
        groups: the cache groups, by name.
        num_blocks: blocks in the pool of each group, by name.
        num_rows: how many requests can hold blocks at once.
        max_model_len: the longest request in tokens; it fixes the width of the tables.
    """

    groups: Iterable[BlockGroup]
    num_blocks: Mapping[str, int]
    num_rows: int
    max_model_len: int
    _pools: dict[str, _Pool] = field(init=False)
    _free_rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._pools = {group.name: self._make_pool(group) for group in self.groups}
        self._free_rows = list(range(self.num_rows))[::-1]

    def _make_pool(self, group: BlockGroup) -> _Pool:
        num_blocks, columns = self.num_blocks[group.name], group.end_block(self.max_model_len)
        table = torch.full((self.num_rows, columns), -1, dtype=torch.int32)
        rows = [0] * self.num_rows
        return _Pool(group, num_blocks, table, list(range(num_blocks))[::-1], rows.copy(), rows.copy())

    def table(self, name: str) -> Tensor:
        """The block table of a group on the host, int32 [num_rows, ceil(max_model_len / block_size)]; read only."""
        return self._pools[name].table

    def free_blocks(self, name: str) -> int:
        """How many blocks of a group nobody holds."""
        return len(self._pools[name].free)

    def shortage(self, num_tokens: int) -> str | None:
        """Why one request of `num_tokens` could not run even with every pool to itself, or None if it could."""
        for pool in self._pools.values():
            needed = pool.group.peak_blocks(num_tokens)
            if needed > pool.num_blocks:
                size = pool.group.block_size
                return f"{needed} {pool.group.name} blocks of {size} tokens, and the pool has {pool.num_blocks}"
        return None

    def open_row(self) -> int:
        """A row without blocks; there must be one left (the scheduler never runs more than `num_rows` requests)."""
        return self._free_rows.pop()

    def close_row(self, row: int) -> None:
        """Give back the row and every block it holds."""
        for pool in self._pools.values():
            pool.drop_before(row, pool.end[row])
            pool.first[row] = pool.end[row] = 0
        self._free_rows.append(row)

    def tokens_that_fit(self, row: int, start: int, wanted: int) -> int:
        """How many of the tokens [start, start + wanted) the row could hold now; 0 if not one."""
        return max(0, min(wanted, *(pool.tokens_that_fit(row, start) for pool in self._pools.values())))

    def extend(self, row: int, num_tokens: int) -> None:
        """Hand the row the blocks it lacks for the tokens [0, num_tokens); ask `tokens_that_fit` first."""
        for pool in self._pools.values():
            pool.extend(row, num_tokens)

    def covers(self, row: int, num_tokens: int) -> bool:
        """Whether the row has all blocks up to that of the last of `num_tokens` tokens."""
        return all(pool.end[row] >= pool.group.end_block(num_tokens) for pool in self._pools.values())

    def release_before(self, row: int, position: int) -> None:
        """Give back the blocks that no query at `position` or later reads."""
        for pool in self._pools.values():
            pool.drop_before(row, pool.group.first_block(position))

    def shuffle(self, rng: random.Random) -> None:
        """Hand out free blocks in a random order from now on, as in a pool that has been used for a long time."""
        for pool in self._pools.values():
            rng.shuffle(pool.free)
