"""The compressor: pools blocks of tokens into one entry each, for the main cache and for the indexer's keys.

The states that it pools are kept one row a token, at the token's position, and there is no running sum: a token that
was computed in vain (a rejected draft) leaves nothing behind once its position is computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import DeepseekV4Config, LayerKind
from .rope import RotaryTable
from .step import StepState


class Compressor(nn.Module):
    """Weights and state cache of one compressor.

    Parameters: `fused_wkv_wgate` ([2 * o * width, hidden], wkv then wgate; o = 2 for C4A, else 1), `ape`
    ([ratio, o * width]), `norm` ([width]).

    Args:
        config: sizes.
        kind: C4A or C128A.
        width: width of an entry: head_dim, or index_head_dim for the indexer's compressor.
        rotary: the layer's RoPE table.
    """

    state_cache: Tensor

    def __init__(self, config: DeepseekV4Config, kind: LayerKind, width: int, rotary: RotaryTable) -> None:
        super().__init__()
        self.kind = kind
        self.ratio = kind.value
        self.eps = repr(config.rms_norm_eps)  # see the note "float constants" in norm.py
        channels = kind.overlap * width
        self.fused_wkv_wgate = nn.Linear(config.hidden_size, 2 * channels, bias=False)
        self.ape = nn.Parameter(torch.zeros(self.ratio, channels))
        self.norm = nn.Parameter(torch.ones(width))
        self.rotary = rotary
        self.register_buffer("state_cache", None, persistent=False)

    def forward(self, kv_score: Tensor, positions: Tensor, step: StepState, cache: Tensor, cache_format: str) -> None:
        """Keep the states of the step's tokens and write the entries of the blocks they close.

        Args:
            kv_score: [T, 2 * o * width], the output of `fused_wkv_wgate`.
            positions: [T] int64.
            step: step state.
            cache: [num_blocks, rows, width], or bytes of a packed format, written.
            cache_format: "auto" or the packed format.
        """
        if self.kind is LayerKind.C4A:
            state_table, state_slots = step.c4_state_block_table, step.c4_state_slot_mapping
            slots = step.c4_slot_mapping
        else:
            state_table, state_slots = step.c128_state_block_table, step.c128_state_slot_mapping
            slots = step.c128_slot_mapping
        torch.ops.dsv4.compress_kv_insert(
            kv_score,
            self.ape,
            self.norm,
            positions,
            self.rotary.cos_sin,
            step.token_to_req,
            state_table,
            state_slots,
            slots,
            self.ratio,
            float(self.eps),
            self.state_cache,
            cache,
            cache_format,
        )
