"""Tiny Hugging Face models with every parameter random, and checkpoint folders in the layouts that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

YARN = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}


def tiny_hf_config(ratios: tuple[int, ...] = (0, 4, 128, 4), **overrides: object) -> DeepseekV4Config:
    """64 indexer heads, so that scores do not tie; `compress_ratios` is explicit because the default order differs."""
    values = {
        "vocab_size": 128,
        "hidden_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "max_position_embeddings": 1024,
        "compress_ratios": list(ratios),
        "num_hash_layers": 1,
        "sliding_window": 128,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 64,
        "index_head_dim": 16,
        "index_topk": 8,
        "pad_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "yarn", **YARN},
        "attn_implementation": "eager",
    }
    return DeepseekV4Config(**{**values, **overrides})


def random_hf_model(
    config: DeepseekV4Config, seed: int = 0, kind: type[DeepseekV4ForCausalLM] = DeepseekV4ForCausalLM
) -> DeepseekV4ForCausalLM:
    """A model whose sinks, position biases, hyper-connection and routing tables are random too."""
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                drawn = 1 + 0.1 * drawn
            elif parameter.dim() > 1 and not name.endswith("position_bias"):
                drawn = drawn * parameter.shape[-1] ** -0.5
            parameter.copy_(drawn)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.randint(config.n_routed_experts, buffer.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


# transformers' names to those of the released checkpoints, applied in order
_RELEASED = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"^mtp\.0\.kv_norm\.", "mtp.0.norm."),
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj\.", ".attn.indexer.weights_proj."),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
)
_NOT_RELEASED = ("layer_types", "mlp_layer_types", "rope_parameters", "compress_rates", "partial_rotary_factor")


def save_as_released(model: DeepseekV4ForCausalLM, folder: Path) -> None:
    """Write a folder with the names and configuration fields of the released checkpoints, in plain fp32."""
    folder.mkdir()
    weights: dict[str, Tensor] = {"mtp.0.e_proj.weight": torch.zeros(2, 2)}  # unless the model has it
    for name, value in model.state_dict().items():
        for pattern, replacement in _RELEASED:
            name = re.sub(pattern, replacement, name)
        weights |= _split_experts(name, value)
    save_file({name: value.contiguous().clone() for name, value in weights.items()}, folder / "model.safetensors")
    config = model.config.to_dict()
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    config["compress_ratios"] = [ratios[kind] for kind in config["layer_types"]] + [
        0
    ]  # the last one is the MTP layer's
    config["num_hash_layers"] = config["mlp_layer_types"].count("hash_moe")
    config["rope_scaling"] = {"type": "yarn", **YARN}
    kept = {name: value for name, value in config.items() if name not in _NOT_RELEASED}
    (folder / "config.json").write_text(json.dumps(kept))


def _split_experts(name: str, value: Tensor) -> dict[str, Tensor]:
    if name.endswith("experts.gate_up_proj"):
        prefix, halves = name.removesuffix("gate_up_proj"), value.chunk(2, dim=1)
        return {
            f"{prefix}{e}.{w}.weight": half[e] for w, half in zip(("w1", "w3"), halves, strict=True) for e in range(8)
        }
    if name.endswith("experts.down_proj"):
        return {f"{name.removesuffix('down_proj')}{e}.w2.weight": value[e] for e in range(len(value))}
    return {name: value}
