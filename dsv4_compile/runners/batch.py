"""One step as tensors: flat token lists, slots and block tables of the chunks that run, on the host, not yet padded.

The requests of a step are its rows, in the order of the chunks (decodes first). Rows and block tables always have
the size of the runner's maximum, so only the token count changes from step to step. A request may have more rows of the
flat lists than tokens: the rows after its tokens are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode import uniform_decode
from ..models.deepseek_v4.config import DeepseekV4Config, LayerKind
from .block_allocator import BlockAllocator, BlockGroup

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


def said_of(num_rows: Sequence[int], most: int) -> AbstractContextManager[None]:
    """Says of a call that its batch is uniform decode, if it is.

    Of a prompt, or the rest of one, so many tokens are no different to an op.

    Args:
        num_rows: rows of each request; none at all is no batch, of which nothing is said.
        most: rows of a request that decodes.
    """
    is_uniform = len(set(num_rows)) == 1 and num_rows[0] <= most
    return uniform_decode(num_rows[0]) if is_uniform else nullcontext()


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
class Span:
    """Consecutive tokens of one request in a step.

    Attributes:
        row: the request's row in the block tables.
        start: position of the first token.
        tokens: their ids.
        num_rows: rows of the step; at least as many as tokens, of which what is left over is padding.
    """

    row: int
    start: int
    tokens: Sequence[int]
    num_rows: int

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def padding(self) -> int:
        """Rows without a token."""
        return self.num_rows - len(self.tokens)


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """Makes the tensors of a step out of its spans.

    Attributes:
        config: block sizes and windows.
        blocks: the block tables.
        max_num_reqs: rows of the request dimension.
    """

    config: DeepseekV4Config
    blocks: BlockAllocator
    max_num_reqs: int

    def build(self, spans: Sequence[Span]) -> dict[str, Tensor]:
        """Every field of a `StepState`, `input_ids` and `positions`, on the host.

        Args:
            spans: what runs, in row order; at most `max_num_reqs`, with their blocks allocated. None at all makes
                a step of no tokens.

        Returns:
            Per-token fields of n = total rows, request fields as `StepState` describes them.
        """
        lengths = [span.num_rows for span in spans]
        input_ids = [token for span in spans for token in (*span.tokens, *[0] * span.padding)]
        places = [p for span in spans for p in (*range(span.start, span.end), *[0] * span.padding)]
        alive = [lives for span in spans for lives in (*[True] * len(span.tokens), *[False] * span.padding)]
        positions, live = torch.tensor(places, dtype=torch.int64), torch.tensor(alive, dtype=torch.bool)
        rows = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(lengths, dtype=torch.int64))
        tables = {group: self._tables(group, spans) for group in ("swa", "compressed", "c4_state", "c128_state")}
        config = self.config
        fields = {
            "input_ids": torch.tensor(input_ids, dtype=torch.int64),
            "positions": positions,
            "token_to_req": rows.to(torch.int32),
            "query_start_loc": self._query_start_loc(lengths),
            "seq_lens": self._seq_lens(spans),
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
        padding = {name: torch.where(live, fields[name], value) for name, value in TOKEN_PADDING.items()}
        return fields | padding

    def _tables(self, group: str, spans: Sequence[Span]) -> Tensor:
        rows = torch.tensor([span.row for span in spans], dtype=torch.int64)
        table = self.blocks.table(group)
        padded = torch.full((self.max_num_reqs, table.shape[1]), -1, dtype=torch.int32)
        padded[: len(spans)] = table[rows]
        return padded

    def _query_start_loc(self, lengths: Sequence[int]) -> Tensor:
        starts = torch.zeros(self.max_num_reqs + 1, dtype=torch.int32)
        starts[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        starts[len(lengths) + 1 :] = sum(lengths)
        return starts

    def _seq_lens(self, spans: Sequence[Span]) -> Tensor:
        seq_lens = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        seq_lens[: len(spans)] = torch.tensor([span.end for span in spans])
        return seq_lens

    def _closing_slots(self, table: Tensor, rows: Tensor, positions: Tensor, kind: LayerKind) -> Tensor:
        """Slots of compressed entries: only the token that closes a block of `ratio` tokens has one."""
        ratio = kind.value
        slots = _slots(table, rows, positions // ratio, self.config.compressed_block_size // ratio)
        return torch.where((positions + 1) % ratio == 0, slots, -1)


def _slots(table: Tensor, rows: Tensor, entries: Tensor, entries_per_block: int) -> Tensor:
    blocks = table[rows, entries // entries_per_block].long()
    return blocks * entries_per_block + entries % entries_per_block
