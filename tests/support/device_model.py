"""Who touches which memory, and when: the model that `fake_cuda` keeps of a device.

Order is a vector clock for each stream: a kernel advances its own, an event carries a clock, a wait takes it over. A
capture has clocks of its own, since nothing of it runs.

A freed block goes to the stream on which it was made, and the next allocation there may get it. So all that touched it
has to come before, except on streams it was recorded for: the allocator waits for these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dsv4_compile.analysis.byte_ranges import byte_range, ranges_meet

WHOLE = (0, 1 << 62)
Span = tuple[int, int]


@dataclass(eq=False)
class Block:
    """Memory of a storage, of cuBLAS, or of a pool of graphs.

    Attributes:
        home: the stream on which it was made, where it goes when it is freed.
        pool: None for that of everybody.
        recorded: streams that the allocator waits for before it hands the block out.
        is_given_away: others may have it, and whoever made it does not know.
    """

    name: str
    home: Any
    pool: Any = None
    storage: Any = None
    recorded: set[Any] = field(default_factory=set)
    is_given_away: bool = False


@dataclass(frozen=True, eq=False)
class Access:
    """What a kernel did to a block."""

    stream: Any
    time: int
    is_write: bool
    span: Span


class Timeline:
    """Clocks, accesses and freed blocks: of the device, or of one capture."""

    def __init__(self) -> None:
        self.clocks: defaultdict[Any, defaultdict[Any, int]] = defaultdict(lambda: defaultdict(int))
        self.accesses: defaultdict[Block, list[Access]] = defaultdict(list)
        self.freed: defaultdict[Any, list[Block]] = defaultdict(list)

    def is_before(self, access: Access, stream: Any) -> bool:
        """Whether work that a stream is given now comes after it."""
        return access.stream is stream or self.clocks[stream][access.stream] >= access.time

    def merge(self, stream: Any, clock: Mapping[Any, int]) -> None:
        """A stream waits for what a clock says."""
        mine = self.clocks[stream]
        for other, time in clock.items():
            mine[other] = max(time, mine[other])

    def allocate(self, stream: Any, name: str) -> Iterator[str]:
        """An allocation on a stream gets any block that was freed there; yields what may go wrong."""
        for block in self.freed.pop(stream, ()):
            users = {access.stream for access in self.accesses.pop(block, ()) if not self.is_before(access, stream)}
            for user in users - block.recorded:
                yield f"REUSE {name} on {stream} may get {block.name}, which {user} still uses"

    def run(self, stream: Any, name: str, touched: Iterable[tuple[Block, bool, Span]]) -> Iterator[str]:
        """A kernel on a stream touches blocks; yields what may go wrong."""
        self.clocks[stream][stream] += 1
        for block, is_write, span in touched:
            if block.is_given_away:
                yield f"REUSE {name} on {stream} uses {block.name}, which is given away"
            for old in self.accesses[block]:
                if (is_write or old.is_write) and ranges_meet(span, old.span) and not self.is_before(old, stream):
                    yield f"RACE {name} on {stream}, and {old.stream}: {block.name}"
            self.accesses[block].append(Access(stream, self.clocks[stream][stream], is_write, span))


def given(function: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that an op is given, and whether it writes them."""
    named = dict(zip([argument.name for argument in function._schema.arguments], args, strict=False)) | kwargs
    for argument in function._schema.arguments:
        is_write = bool(argument.alias_info and argument.alias_info.is_write)
        yield from ((leaf, is_write) for leaf in tree_leaves(named.get(argument.name)) if is_memory(leaf))


def is_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.untyped_storage().data_ptr() != 0


def span_of(tensor: torch.Tensor) -> Span:
    start, end = byte_range(tensor)
    base = tensor.untyped_storage().data_ptr()
    return start - base, end - base
