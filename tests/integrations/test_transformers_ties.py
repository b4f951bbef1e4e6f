"""Few indexer heads, so that scores tie: the tokens of a transformers whose top-k breaks ties by the lower id.

transformers leaves ties to `torch.topk`, which has no order; in these tests a stable sort stands in for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hf_layers import LIMITS, RUNNERS, hf_layer, make_prompts, our_layer
from hf_models import random_hf_model, tiny_hf_config
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from dsv4_compile.integrations.transformers import swap_attention
from dsv4_compile.runners import ModelRunner

PROMPTS = make_prompts(3, 150, 1, 64, 129)


@contextmanager
def lower_ids_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Break the ties of transformers' indexer; gives how many rows of each call had a tie at the boundary."""
    ties: list[int] = []

    def stable_topk(scores: Tensor, k: int, dim: int = -1, **options: object) -> object:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        if scores.shape[dim] > k > 0:
            at, beyond = values[..., k - 1], values[..., k]
            ties.append(int(((at == beyond) & beyond.isfinite()).sum()))
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    forward = modeling_deepseek_v4.DeepseekV4Indexer.forward

    def indexer(self: torch.nn.Module, *args: object, **kwargs: object) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "topk", stable_topk)
            return forward(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_deepseek_v4.DeepseekV4Indexer, "forward", indexer)
        yield ties


@pytest.mark.sampled(9)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_one_layer_with_few_indexer_heads(monkeypatch: pytest.MonkeyPatch, heads: int, seed: int) -> None:
    model = random_hf_model(tiny_hf_config((4,), index_n_heads=heads), seed=seed)
    hidden = torch.randn(300, 48, generator=torch.Generator().manual_seed(seed))
    with lower_ids_first(monkeypatch) as ties:
        expected = hf_layer(model, hidden)
    assert sum(ties) > 5
    swapped = swap_attention(model)
    for chunk in (300, 37, 1):
        torch.testing.assert_close(our_layer(swapped, hidden, chunk), expected, rtol=0, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("runner_type", RUNNERS)
def test_the_greedy_tokens_with_few_indexer_heads(
    monkeypatch: pytest.MonkeyPatch, runner_type: type[ModelRunner], heads: int
) -> None:
    model = random_hf_model(tiny_hf_config(index_n_heads=heads), seed=heads)
    with lower_ids_first(monkeypatch) as ties:
        generated = [model.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False)[0] for p in PROMPTS]
    assert sum(ties) > 10
    expected = [tokens[len(p) :].tolist() for tokens, p in zip(generated, PROMPTS, strict=True)]
    swapped = swap_attention(model)
    for most, buckets in ((300, None), (64, (4, 64)), (7, None)):
        limits = {**LIMITS, "max_num_batched_tokens": most}
        runner = runner_type(swapped, swapped.config, **limits, buckets=buckets)
        assert runner.generate(PROMPTS, 12) == expected, most
