"""Step state: the tensors a model runner rebuilds or refills for every step.

It is an explicit argument of the model, so every tensor of it is a graph input and a compiler sees which op reads it.
-1 means skip, everywhere: a padded token, a slot that is not written, a block that is not allocated. The request
dimension is always the runner's maximum (unused rows padded), so only the token count varies from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepState:
    """Tensors of one step of T tokens and at most B requests.

    A slot is `block * rows_per_block + row` of the cache it indexes. Block tables have one row a request; column j
    is the block of the tokens [j * block_tokens, (j + 1) * block_tokens).

    Attributes:
        token_to_req: [T] int32, the request row of each token, -1 for padding.
        query_start_loc: [B + 1] int32, where each request's rows start; unused rows repeat the end. A request may have
            fewer tokens than rows: those after its tokens are padding.
        seq_lens: [B] int32, length of each request including this step's tokens, 0 if unused.
        swa_slot_mapping: [T] int64, slots of the sliding-window cache.
        swa_block_table: [B, n] int32, blocks of `swa_block_size` tokens; -1 where freed or not allocated.
        block_table: [B, n] int32, blocks of `compressed_block_size` tokens, shared by the compressed caches of both
            ratios and the indexer's keys.
        c4_slot_mapping, c128_slot_mapping: [T] int64, slots in compressed rows, -1 unless the token closes a block.
        c4_state_slot_mapping, c128_state_slot_mapping: [T] int64, slots of the compressor state caches.
        c4_state_block_table, c128_state_block_table: [B, n] int32, blocks of the state block sizes.
    """

    token_to_req: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    swa_slot_mapping: Tensor
    swa_block_table: Tensor
    block_table: Tensor
    c4_slot_mapping: Tensor
    c128_slot_mapping: Tensor
    c4_state_slot_mapping: Tensor
    c4_state_block_table: Tensor
    c128_state_slot_mapping: Tensor
    c128_state_block_table: Tensor


torch.export.register_dataclass(StepState)
