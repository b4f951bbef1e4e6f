"""Step states for tests, slot by slot: blocks shuffled, requests cut into any pieces, padding at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_compile.models.deepseek_v4 import DeepseekV4Config, LayerCaches, StepState, YarnScaling, allocate_caches


def tiny_config(ratios: Sequence[int] = (0, 4, 128), **overrides: object) -> DeepseekV4Config:
    """Sizes of which none divides another by accident; 64 indexer heads, so that scores do not tie."""
    values = {
        "hidden_size": 40,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 6,
        "head_dim": 20,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 28,
        "o_lora_rank": 12,
        "o_groups": 3,
        "sliding_window": 11,
        "compress_ratios": tuple(ratios),
        "index_n_heads": 64,
        "index_head_dim": 14,
        "index_topk": 7,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": YarnScaling(factor=16.0, original_max_position_embeddings=256),
        "max_position_embeddings": 1024,
        "vocab_size": 97,
        "max_num_batched_tokens": 512,
    }
    return DeepseekV4Config(**{**values, **overrides})


class Paging:
    """Hands every request shuffled blocks for `max_len` tokens in each cache group, and builds step states.

    Args:
        config: block sizes.
        lengths: most tokens of each request.
        max_reqs: rows of the block tables.
        spare: blocks of each group that nobody owns.
        seed: of the shuffle.
    """

    def __init__(
        self, config: DeepseekV4Config, lengths: Sequence[int], *, max_reqs: int = 5, spare: int = 2, seed: int = 0
    ) -> None:
        self.config, self.max_reqs = config, max_reqs
        self.block_tokens = {
            "swa": config.swa_block_size,
            "compressed": config.compressed_block_size,
            "c4_state": config.c4_state_block_size,
            "c128_state": config.c128_state_block_size,
        }
        rng = random.Random(seed)
        self.tables: dict[str, list[list[int]]] = {}
        self.num_blocks: dict[str, int] = {}
        for group, size in self.block_tokens.items():
            counts = [-(-length // size) for length in lengths]
            blocks = list(range(sum(counts) + spare))
            self.num_blocks[group] = len(blocks)
            rng.shuffle(blocks)
            self.tables[group] = [[blocks.pop() for _ in range(count)] for count in counts]

    def caches(self, dtype: torch.dtype = torch.float32, fill: float = float("nan")) -> list[LayerCaches]:
        """Caches that hold `fill` everywhere; packed ones the byte 255, which is NaN wherever there is one."""
        caches = allocate_caches(self.config, self.num_blocks, dtype=dtype)
        for layer in caches:
            for tensor in vars(layer).values():
                if tensor is not None:
                    tensor.fill_(255 if tensor.dtype is torch.uint8 else fill)
        return caches

    def table(self, group: str) -> Tensor:
        """[max_reqs, n] int32; -1 where a request has no block."""
        width = max(len(row) for row in self.tables[group]) + 1
        rows = [row + [-1] * (width - len(row)) for row in self.tables[group]]
        rows += [[-1] * width] * (self.max_reqs - len(rows))
        return torch.tensor(rows, dtype=torch.int32)

    def slot(self, group: str, request: int, position: int, ratio: int = 1) -> int:
        """Slot of a position, in rows of `ratio` tokens."""
        size = self.block_tokens[group]
        return self.tables[group][request][position // size] * (size // ratio) + position % size // ratio

    def step(self, spans: Sequence[tuple[int, int, int]], *, padding: int = 0) -> tuple[Tensor, StepState]:
        """Positions and step state of (request, start, count) spans, then padded tokens."""
        tokens = [(request, p) for request, start, count in spans for p in range(start, start + count)]
        lengths = {request: start + count for request, start, count in spans}
        starts = [0]
        for _, _, count in spans:
            starts.append(starts[-1] + count)
        starts += [starts[-1]] * (self.max_reqs + 1 - len(starts))

        def slots(group: str, ratio: int = 1) -> Tensor:
            found = [self.slot(group, r, p, ratio) if (p + 1) % ratio == 0 else -1 for r, p in tokens]
            return torch.tensor(found + [-1] * padding)

        step = StepState(
            token_to_req=torch.tensor([r for r, _ in tokens] + [-1] * padding, dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([lengths.get(r, 0) for r in range(self.max_reqs)], dtype=torch.int32),
            swa_slot_mapping=slots("swa"),
            swa_block_table=self.table("swa"),
            block_table=self.table("compressed"),
            c4_slot_mapping=slots("compressed", 4),
            c128_slot_mapping=slots("compressed", 128),
            c4_state_slot_mapping=slots("c4_state"),
            c4_state_block_table=self.table("c4_state"),
            c128_state_slot_mapping=slots("c128_state"),
            c128_state_block_table=self.table("c128_state"),
        )
        return torch.tensor([p for _, p in tokens] + [0] * padding), step
