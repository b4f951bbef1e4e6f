"""The indexer of C4A layers: its queries, head weights and compressed keys; the selection itself is a split op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...ops.cache_formats import empty_queries
from .compressor import Compressor
from .config import DeepseekV4Config, LayerKind
from .shared import SharedBuffers
from .step import StepState

IndexerOutput = tuple[Tensor | None, Tensor | None, Tensor | None]


class Indexer(nn.Module):
    """Prepares what `dsv4::sparse_indexer` scores.

    Parameters: `wq_b` ([heads * width, q_lora]), `weights_proj` ([heads, hidden]), `compressor`.
    """

    k_cache: Tensor

    def __init__(self, config: DeepseekV4Config, shared: SharedBuffers) -> None:
        super().__init__()
        self.num_heads = config.index_n_heads
        self.width = config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, self.num_heads * self.width, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.rotary = shared.rotary(LayerKind.C4A)
        self.topk = shared.topk()
        self.compressor = Compressor(config, LayerKind.C4A, self.width, self.rotary)
        self.k_format = config.index_format  # as of the cache that is bound
        self.register_buffer("k_cache", None, persistent=False)

    def forward(
        self, qr: Tensor, weights: Tensor, kv_score: Tensor, positions: Tensor, step: StepState
    ) -> IndexerOutput:
        """Rotate the queries, scale the weights, insert the keys.

        Args:
            qr: [T, q_lora], the normed low-rank query.
            weights: [T, heads], the output of `weights_proj`.
            kv_score: [T, 4 * width], the output of the compressor's projection.
            positions: [T] int64.
            step: step state.

        Returns:
            index_q [T, heads, width] in the format of the keys, index_q_scale (None but for "mxfp4"), index_weights
            fp32 [T, heads].
        """
        index_q = self.wq_b(qr).view(-1, self.num_heads, self.width)
        rotated, scales = empty_queries(index_q, self.k_format)
        scaled = torch.empty_like(weights, dtype=torch.float32)
        torch.ops.dsv4.indexer_q_rope(
            index_q,
            weights,
            positions,
            self.rotary.cos_sin,
            self.width**-0.5 * self.num_heads**-0.5,
            rotated,
            scaled,
            scales,
            self.k_format,
        )
        self.compressor(kv_score, positions, step, self.k_cache, self.k_format)
        return rotated, scales, scaled
