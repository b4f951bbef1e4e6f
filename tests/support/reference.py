"""An attention layer of DeepSeek V4 as its formulae read: one request, contiguous, one token at a time.

Written from the mathematics and sharing no code with `ops/`: complex numbers for RoPE, Python lists for caches.
Everything runs in the dtype of its inputs (tests pass float64), except the RoPE angles, which the model defines in
fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsv4_compile.models.deepseek_v4 import DeepseekV4Config

Select = Callable[[int, Tensor], Sequence[int]]


def frequencies(config: DeepseekV4Config, *, compressed: bool) -> Tensor:
    dims = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    values = [torch.tensor(1.0) / theta ** (torch.tensor(2.0 * i) / dims) for i in range(dims // 2)]
    yarn = config.rope_scaling
    if not compressed or yarn is None:
        return torch.stack(values)

    def dim_of(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return dims * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dims - 1)
    high = high + 0.001 if high == low else high
    ramps = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dims // 2)]
    return torch.stack([f * (1 - ramp) + f / yarn.factor * ramp for f, ramp in zip(values, ramps, strict=True)])


def rope(x: Tensor, position: int, freqs: Tensor, *, inverse: bool = False) -> Tensor:
    """x [..., D], rotated at one position."""
    dims = 2 * freqs.shape[0]
    angles = (torch.tensor(float(position)) * freqs).to(x.dtype)
    turn = torch.polar(torch.ones_like(angles), -angles if inverse else angles)
    pairs = torch.view_as_complex(x[..., -dims:].reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.cat([x[..., :-dims], torch.view_as_real(pairs * turn).flatten(-2)], dim=-1)


def rms_norm(x: Tensor, eps: float, weight: Tensor | float = 1.0) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def compressed_entry(k: Tensor, z: Tensor, block: int, ratio: int, norm: Tensor, freqs: Tensor, eps: float) -> Tensor:
    """Entry of a block from k and z (with ape) of all tokens: [S, o * D] each."""
    own = range(block * ratio, (block + 1) * ratio)
    if ratio == 4:
        width = k.shape[1] // 2
        rows = [(k[j, width:], z[j, width:]) for j in own]
        if block > 0:
            rows += [(k[j, :width], z[j, :width]) for j in range((block - 1) * ratio, block * ratio)]
    else:
        rows = [(k[j], z[j]) for j in own]
    ks, zs = (torch.stack(part) for part in zip(*rows, strict=True))
    share = zs.exp() / zs.exp().sum(0)
    return rope(rms_norm((share * ks).sum(0), eps, norm), block * ratio, freqs)


def index_scores(index_q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """index_q [heads, width], weights [heads], keys [n, width] -> [n]."""
    return torch.stack([(weights * (index_q @ key).clamp(min=0)).sum() for key in keys])


def best(scores: Tensor, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda b: -scores[b].item())[:count]


def sink_attention(q: Tensor, keys: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [H, D], keys [n, D], sink [H] -> [H, D]."""
    heads = []
    for h in range(q.shape[0]):
        logits = keys @ q[h] * scale
        top = torch.maximum(logits.max(), sink[h])
        share = (logits - top).exp()
        heads.append(share @ keys / (share.sum() + (sink[h] - top).exp()))
    return torch.stack(heads)


def compress_all(
    x: Tensor, w: Mapping[str, Tensor], prefix: str, ratio: int, freqs: Tensor, eps: float
) -> list[Tensor]:
    """All completed entries of a request."""
    wkv, wgate = w[f"{prefix}fused_wkv_wgate.weight"].chunk(2)
    ape = w[f"{prefix}ape"]
    k = x @ wkv.T
    z = torch.stack([x[j] @ wgate.T + ape[j % ratio] for j in range(len(x))])
    blocks = len(x) // ratio
    return [compressed_entry(k, z, b, ratio, w[f"{prefix}norm"], freqs, eps) for b in range(blocks)]


def attention_layer(
    x: Tensor, w: Mapping[str, Tensor], config: DeepseekV4Config, ratio: int, select: Select | None = None
) -> Tensor:
    """One layer over the tokens x [S, hidden] of a request at positions 0..S-1: [S, hidden].

    Args:
        x: hidden states.
        w: the state dict of a `DeepseekV4Attention`, in the dtype of x.
        config: sizes.
        ratio: 0, 4 or 128.
        select: (position, scores) -> block ids, instead of the top-k of the scores.
    """
    c = config
    freqs = frequencies(c, compressed=ratio > 0)
    wq_a, wkv = w["fused_wqa_wkv.weight"].split([c.q_lora_rank, c.head_dim])
    entries = compress_all(x, w, "compressor.", ratio, freqs, c.rms_norm_eps) if ratio else []
    index_keys = compress_all(x, w, "indexer.compressor.", 4, freqs, c.rms_norm_eps) if ratio == 4 else []
    raw: list[Tensor] = []
    outputs = []
    for p in range(len(x)):
        qr = rms_norm(wq_a @ x[p], c.rms_norm_eps, w["q_norm"])
        q = rms_norm((w["wq_b.weight"] @ qr).view(c.num_attention_heads, c.head_dim), c.rms_norm_eps)
        q = rope(q, p, freqs)
        raw.append(rope(rms_norm(wkv @ x[p], c.rms_norm_eps, w["kv_norm"]), p, freqs))
        visible = list(range((p + 1) // ratio)) if ratio else []
        if ratio == 4 and visible:
            scores = _scores_of_token(x[p], qr, p, w, c, freqs, index_keys[: len(visible)])
            visible = list(select(p, scores)) if select else best(scores, c.index_topk)
        keys = torch.stack(raw[max(0, p - c.sliding_window + 1) :] + [entries[b] for b in visible])
        o = sink_attention(q, keys, w["attn_sink"], c.head_dim**-0.5)
        outputs.append(_project_output(rope(o, p, freqs, inverse=True), w, c))
    return torch.stack(outputs)


def _scores_of_token(
    x: Tensor, qr: Tensor, p: int, w: Mapping[str, Tensor], c: DeepseekV4Config, freqs: Tensor, keys: list[Tensor]
) -> Tensor:
    index_q = rope((w["indexer.wq_b.weight"] @ qr).view(c.index_n_heads, c.index_head_dim), p, freqs)
    weights = w["indexer.weights_proj.weight"] @ x / math.sqrt(c.index_head_dim * c.index_n_heads)
    return index_scores(index_q, weights, torch.stack(keys))


def _project_output(o: Tensor, w: Mapping[str, Tensor], c: DeepseekV4Config) -> Tensor:
    parts = o.reshape(c.o_groups, -1)
    weights = w["wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
    return w["wo_b.weight"] @ torch.cat([weights[g] @ parts[g] for g in range(c.o_groups)])
