"""The attention layer of DeepSeek V4, one linear forward for its three kinds.

Order matters only where a cache is concerned: all cache writes of a step come before the split ops that read them.
The four input projections come first, side by side, because nothing between them depends on another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import CacheBindingError
from ...ops.kernels.scratch import indexer_scratch, mqa_scratch
from .cache_checks import why_not_caches_of, with_formats_of
from .caches import LayerCaches, layer_cache_specs
from .compressor import Compressor
from .config import DeepseekV4Config, LayerKind
from .indexer import Indexer, IndexerOutput
from .shared import SharedBuffers
from .step import StepState


class InputProjections(NamedTuple):
    """Outputs of the input GEMMs; None where the layer kind has no such part.

    Attributes:
        qr_kv: [T, q_lora + head_dim], low-rank query then key-value.
        kv_score: [T, 2 * o * head_dim], of the main compressor.
        index_kv_score: [T, 4 * index_head_dim], of the indexer's compressor.
        index_weights: [T, index_n_heads], head weights of the indexer, not scaled.
    """

    qr_kv: Tensor
    kv_score: Tensor | None
    index_kv_score: Tensor | None
    index_weights: Tensor | None


class DeepseekV4Attention(nn.Module):
    """One attention layer; bind caches with `bind_caches` before the first call.

    Parameters: `fused_wqa_wkv` ([q_lora + head_dim, hidden]), `q_norm` ([q_lora]), `kv_norm` ([head_dim]), `wq_b`
    ([heads * head_dim, q_lora]), `attn_sink` ([heads]), `wo_a` ([groups * o_lora, heads * head_dim / groups]),
    `wo_b` ([hidden, groups * o_lora]), `compressor` (not for SWA), `indexer` (C4A only). Matrices are
    `nn.Linear` without bias, vectors are parameters of the layer.

    Args:
        config: sizes.
        layer_idx: which layer; decides the kind.
        shared: buffers shared with the other layers of the model; None makes a set of its own.
    """

    swa_cache: Tensor
    kv_cache: Tensor | None

    def __init__(self, config: DeepseekV4Config, layer_idx: int, shared: SharedBuffers | None = None) -> None:
        super().__init__()
        shared = shared or SharedBuffers(config)
        self.layer_idx = layer_idx
        self.kind = config.kind(layer_idx)
        self.num_heads, self.head_dim, self.num_groups = config.num_attention_heads, config.head_dim, config.o_groups
        self.q_lora_rank, self.o_lora_rank = config.q_lora_rank, config.o_lora_rank
        self.window = config.sliding_window
        self.eps = repr(config.rms_norm_eps)  # see the note "float constants" in norm.py
        self.rope_dims = config.qk_rope_head_dim
        self.kv_format = config.kv_format  # as of the caches that are bound
        self._config = config
        self._cache_names = {spec.name for spec in layer_cache_specs(config, self.kind)}
        self._add_parameters(config)
        self.rotary = shared.rotary(self.kind)
        compressed = self.kind is not LayerKind.SWA
        self.compressor = Compressor(config, self.kind, self.head_dim, self.rotary) if compressed else None
        self.indexer = Indexer(config, shared) if self.kind is LayerKind.C4A else None
        self.register_buffer("swa_cache", None, persistent=False)
        self.register_buffer("kv_cache", None, persistent=False)

    def _add_parameters(self, config: DeepseekV4Config) -> None:
        all_heads = self.num_heads * self.head_dim
        low_rank = self.num_groups * self.o_lora_rank
        self.fused_wqa_wkv = nn.Linear(config.hidden_size, self.q_lora_rank + self.head_dim, bias=False)
        self.q_norm = nn.Parameter(torch.ones(self.q_lora_rank))
        self.kv_norm = nn.Parameter(torch.ones(self.head_dim))
        self.wq_b = nn.Linear(self.q_lora_rank, all_heads, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(self.num_heads))
        self.wo_a = nn.Linear(all_heads // self.num_groups, low_rank, bias=False)
        self.wo_b = nn.Linear(low_rank, config.hidden_size, bias=False)

    def bind(self, caches: LayerCaches) -> None:
        """Use these caches from now on, and none of those bound before.

        Args:
            caches: those that `layer_cache_specs` lists for the layer's kind, [num_blocks, rows, width] each. They may
                be of any format where the configuration says "auto".

        Raises:
            CacheBindingError: they are those of another kind of layer, or of another format.
        """
        config = self.check_caches(caches)
        self.kv_format = config.kv_format
        self.swa_cache = caches.swa_cache
        self.kv_cache = caches.kv_cache
        if self.compressor is not None and caches.state_cache is not None:
            self.compressor.state_cache = caches.state_cache
        if self.indexer is not None and caches.indexer_k_cache is not None and caches.indexer_state_cache is not None:
            self.indexer.k_cache = caches.indexer_k_cache
            self.indexer.k_format = config.index_format
            self.indexer.compressor.state_cache = caches.indexer_state_cache

    def check_caches(self, caches: LayerCaches) -> DeepseekV4Config:
        """Raise CacheBindingError unless these are the caches of the layer's kind; return the configuration with their
        formats."""
        given = caches.names()
        if given != self._cache_names:
            raise CacheBindingError(
                f"attention layer {self.layer_idx} ({self.kind.name}) needs {', '.join(sorted(self._cache_names))}, "
                f"and is given {', '.join(sorted(given))}: allocate the caches with the configuration of the model"
            )
        config = with_formats_of(self._config, caches)
        if (reason := why_not_caches_of(config, self.kind, caches)) is not None:
            raise CacheBindingError(
                f"attention layer {self.layer_idx} ({self.kind.name}): {reason}: allocate the caches with the "
                "configuration of the model"
            )
        return config

    def forward(self, hidden_states: Tensor, positions: Tensor, step: StepState) -> Tensor:
        """Attend, after writing the caches of this step's tokens.

        Args:
            hidden_states: [T, hidden], normed.
            positions: [T] int64, 0 for padded tokens.
            step: step state.

        Returns:
            [T, hidden], finite for padded tokens as long as their hidden states are.

        Raises:
            CacheBindingError: no caches are bound.
        """
        if self.swa_cache is None:
            self._refuse_unbound()
        projections = self.run_input_projections(hidden_states)
        qr, kv = self.normalise_query_and_kv(projections.qr_kv)
        q = self.project_query_and_cache_kv(qr, kv, positions, step)
        self.compress_kv(projections, positions, step)
        index = self.prepare_index(qr, projections, positions, step)
        topk_indices = self.select_blocks(index, positions, step)
        attended = self.attend(q, topk_indices, positions, step)
        return self.project_output(attended, positions)

    def run_input_projections(self, hidden_states: Tensor) -> InputProjections:
        """The independent GEMMs on the layer's input."""
        compressor, indexer = self.compressor, self.indexer
        return InputProjections(
            qr_kv=self.fused_wqa_wkv(hidden_states),
            kv_score=compressor.fused_wkv_wgate(hidden_states) if compressor is not None else None,
            index_kv_score=indexer.compressor.fused_wkv_wgate(hidden_states) if indexer is not None else None,
            index_weights=indexer.weights_proj(hidden_states) if indexer is not None else None,
        )

    def normalise_query_and_kv(self, qr_kv: Tensor) -> tuple[Tensor, Tensor]:
        """Both RMS norms: qr [T, q_lora] and kv [T, head_dim]."""
        qr = qr_kv.new_empty(qr_kv.shape[0], self.q_lora_rank)
        kv = qr_kv.new_empty(qr_kv.shape[0], self.head_dim)
        torch.ops.dsv4.fused_q_kv_rmsnorm(qr_kv, self.q_norm, self.kv_norm, float(self.eps), qr, kv)
        return qr, kv

    def project_query_and_cache_kv(self, qr: Tensor, kv: Tensor, positions: Tensor, step: StepState) -> Tensor:
        """Queries, normed and rotated: [T, heads, head_dim]; kv goes to the sliding-window cache."""
        q = self.wq_b(qr).view(-1, self.num_heads, self.head_dim)
        rotated = torch.empty_like(q)
        torch.ops.dsv4.qnorm_rope_kv_insert(
            q,
            kv,
            positions,
            self.rotary.cos_sin,
            step.swa_slot_mapping,
            float(self.eps),
            rotated,
            self.swa_cache,
            self.kv_format,
        )
        return rotated

    def compress_kv(self, projections: InputProjections, positions: Tensor, step: StepState) -> None:
        """Main compressor: states and compressed entries of this step go to their caches; nothing for SWA.

        Args:
            projections: of it `kv_score` [T, 2 * o * head_dim].
            positions: [T] int64.
            step: step state.
        """
        if self.compressor is not None:
            self.compressor(projections.kv_score, positions, step, self.kv_cache, self.kv_format)

    def prepare_index(
        self, qr: Tensor, projections: InputProjections, positions: Tensor, step: StepState
    ) -> IndexerOutput:
        """What the indexer scores with; its keys of this step go to its cache.

        Args:
            qr: [T, q_lora], the normed low-rank query.
            projections: of it `index_kv_score` [T, 4 * index_head_dim] and `index_weights` [T, index_n_heads].
            positions: [T] int64.
            step: step state.

        Returns:
            index_q [T, index_n_heads, index_head_dim], index_q_scale, index_weights fp32 [T, index_n_heads]; which are
            None depends on the layer kind and the format of the indexer's cache only.
        """
        if self.indexer is None:
            return None, None, None
        output: IndexerOutput = self.indexer(qr, projections.index_weights, projections.index_kv_score, positions, step)
        return output

    def select_blocks(self, index: IndexerOutput, positions: Tensor, step: StepState) -> Tensor | None:
        """Fill the model's buffer of selected block ids for this layer.

        Args:
            index: what `prepare_index` returned.
            positions: [T] int64.
            step: step state.

        Returns:
            int32 [max_num_batched_tokens, index_topk], of which this step's are the first T rows; -1 selects nothing.
            None if the layer selects none.
        """
        if self.indexer is None:
            return None
        topk_indices = self.indexer.topk.indices
        torch.ops.dsv4.sparse_indexer(
            *index,
            positions,
            self.indexer.k_cache,
            step.token_to_req,
            step.block_table,
            self.kind.value,
            topk_indices,
            self.indexer.k_format,
            scratch=indexer_scratch(topk_indices),
        )
        return topk_indices

    def attend(self, q: Tensor, topk_indices: Tensor | None, positions: Tensor, step: StepState) -> Tensor:
        """Attention over window and compressed entries: [T, heads, head_dim], zero for padded tokens."""
        out = torch.empty_like(q)
        torch.ops.dsv4.forward_mqa(
            q,
            self.attn_sink,
            positions,
            step.token_to_req,
            self.swa_cache,
            step.swa_block_table,
            self.kv_cache,
            step.block_table if self.kv_cache is not None else None,
            topk_indices,
            self.window,
            self.kind.value,
            self.head_dim**-0.5,
            out,
            self.kv_format,
            self.rope_dims,
            scratch=mqa_scratch(q),
        )
        return out

    def project_output(self, attended: Tensor, positions: Tensor) -> Tensor:
        """Inverse RoPE, the grouped low-rank projection and the output projection: [T, hidden]."""
        unrotated = torch.empty_like(attended)
        torch.ops.dsv4.inverse_rope(attended, positions, self.rotary.cos_sin, unrotated)
        groups = unrotated.view(-1, self.num_groups, self.wo_a.in_features).transpose(0, 1)
        weights = self.wo_a.weight.view(self.num_groups, self.o_lora_rank, self.wo_a.in_features).transpose(1, 2)
        low_rank = torch.bmm(groups, weights).transpose(0, 1).flatten(1)
        output: Tensor = self.wo_b(low_rank)
        return output

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _refuse_unbound(self) -> None:
        """In a method that Dynamo runs as it is: traced, the error would be lost in one of Dynamo's."""
        raise CacheBindingError(
            f"attention layer {self.layer_idx} has no caches: call bind_caches(model, caches) first"
        )
