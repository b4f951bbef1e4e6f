"""One step as tensors: flat token lists, slots and block tables of the chunks that run, on the host, not yet padded.

The requests of a step are its rows, in the order of the chunks (decodes first). Rows and block tables always have
the size of the runner's maximum, so only the token count changes from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.deepseek_v4.config import DeepseekV4Config, LayerKind
from .block_allocator import BlockAllocator, BlockGroup
from .scheduler import Chunk

# The per-token fields of a step and the value that pads them; token ids and positions are padded with an ordinary 0.
TOKEN_PADDING = {
    "input_ids": 0,
    "positions": 0,
    "token_to_req": -1,
    "swa_slot_mapping": -1,
    "c4_slot_mapping": -1,
    "c128_slot_mapping": -1,
    "c4_state_slot_mapping": -1,
    "c128_state_slot_mapping": -1,
}
REQUEST_FIELDS = (
    "query_start_loc",
    "seq_lens",
    "swa_block_table",
    "block_table",
    "c4_state_block_table",
    "c128_state_block_table",
)


def block_groups(config: DeepseekV4Config) -> tuple[BlockGroup, ...]:
    """The block groups of a model: the sliding window, compressed entries, and the states of both compressors."""

    def states(kind: LayerKind, name: str) -> BlockGroup:
        return BlockGroup(name=name, block_size=config.state_block_size(kind), window=kind.value * kind.overlap)

    return (
        BlockGroup(name="swa", block_size=config.swa_block_size, window=config.sliding_window),
        BlockGroup(name="compressed", block_size=config.compressed_block_size),
        states(LayerKind.C4A, "c4_state"),
        states(LayerKind.C128A, "c128_state"),
    )


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """Makes the tensors of a step out of its chunks.

    Attributes:
        config: block sizes and windows.
        blocks: the block tables.
        max_num_reqs: rows of the request dimension.
    """

    config: DeepseekV4Config
    blocks: BlockAllocator
    max_num_reqs: int

    def build(self, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """Every field of a `StepState`, `input_ids` and `positions`, on the host.

        Args:
            chunks: what runs, in row order; at most `max_num_reqs`, with their blocks allocated. None at all makes
                a step of no tokens.

        Returns:
            Per-token fields of n = total tokens rows, request fields as `StepState` describes them.
        """
        lengths = [chunk.num_tokens for chunk in chunks]
        input_ids = [token for chunk in chunks for token in chunk.request.tokens[chunk.start : chunk.end]]
        positions = torch.tensor([p for chunk in chunks for p in range(chunk.start, chunk.end)], dtype=torch.int64)
        rows = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(lengths, dtype=torch.int64))
        tables = {group: self._tables(group, chunks) for group in ("swa", "compressed", "c4_state", "c128_state")}
        config = self.config
        return {
            "input_ids": torch.tensor(input_ids, dtype=torch.int64),
            "positions": positions,
            "token_to_req": rows.to(torch.int32),
            "query_start_loc": self._query_start_loc(lengths),
            "seq_lens": self._seq_lens(chunks),
            "swa_slot_mapping": _slots(tables["swa"], rows, positions, config.swa_block_size),
            "swa_block_table": tables["swa"],
            "block_table": tables["compressed"],
            "c4_slot_mapping": self._closing_slots(tables["compressed"], rows, positions, LayerKind.C4A),
            "c128_slot_mapping": self._closing_slots(tables["compressed"], rows, positions, LayerKind.C128A),
            "c4_state_slot_mapping": _slots(tables["c4_state"], rows, positions, config.c4_state_block_size),
            "c4_state_block_table": tables["c4_state"],
            "c128_state_slot_mapping": _slots(tables["c128_state"], rows, positions, config.c128_state_block_size),
            "c128_state_block_table": tables["c128_state"],
        }

    def _tables(self, group: str, chunks: Sequence[Chunk]) -> Tensor:
        rows = torch.tensor([chunk.request.row for chunk in chunks], dtype=torch.int64)
        table = self.blocks.table(group)
        padded = torch.full((self.max_num_reqs, table.shape[1]), -1, dtype=torch.int32)
        padded[: len(chunks)] = table[rows]
        return padded

    def _query_start_loc(self, lengths: Sequence[int]) -> Tensor:
        starts = torch.zeros(self.max_num_reqs + 1, dtype=torch.int32)
        starts[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        starts[len(lengths) + 1 :] = sum(lengths)
        return starts

    def _seq_lens(self, chunks: Sequence[Chunk]) -> Tensor:
        seq_lens = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        seq_lens[: len(chunks)] = torch.tensor([chunk.end for chunk in chunks])
        return seq_lens

    def _closing_slots(self, table: Tensor, rows: Tensor, positions: Tensor, kind: LayerKind) -> Tensor:
        """Slots of compressed entries: only the token that closes a block of `ratio` tokens has one."""
        ratio = kind.value
        slots = _slots(table, rows, positions // ratio, self.config.compressed_block_size // ratio)
        return torch.where((positions + 1) % ratio == 0, slots, -1)


def _slots(table: Tensor, rows: Tensor, entries: Tensor, entries_per_block: int) -> Tensor:
    blocks = table[rows, entries // entries_per_block].long()
    return blocks * entries_per_block + entries % entries_per_block
