"""Serving from packed caches gives the tokens of a transformers whose caches hold numbers rounded by the formulae."""

from __future__ import annotations

import functools
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from _rounding import rounded_caches
from hf_layers import LIMITS, RUNNERS, hf_layer, make_prompts, our_layer
from hf_models import random_hf_model, tiny_hf_config
from torch import Tensor
from transformers import DeepseekV4ForCausalLM
from transformers.cache_utils import DynamicCache

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import UnsupportedConfigError
from dsv4_compile.integrations.transformers import SwappedModel, load, swap_attention
from dsv4_compile.models.deepseek_v4 import StepState
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2

ROPE_DIMS = 8
NEW_TOKENS = 8
FORMATS = [
    ("fp8_ds_mla", "mxfp4"),
    ("fp8_ds_mla", "fp8"),
    ("fp8_ds_mla", "bf16"),
    ("fp8_ds_mla", "auto"),
    ("bf16", "bf16"),
    ("bf16", "mxfp4"),
    ("auto", "fp8"),
]
BUCKETS = (4, 16, 64)
formats = pytest.mark.parametrize("words", FORMATS, ids="+".join)


@functools.cache
def original() -> DeepseekV4ForCausalLM:
    model = random_hf_model(tiny_hf_config((0, 4, 128, 4), hc_sinkhorn_iters=2))
    model.set_experts_implementation("batched_mm")
    return model


@functools.cache
def prompts() -> list[list[int]]:
    return make_prompts(3, 150, 70)


@functools.cache
def tokens_of_transformers(kv: str, index: str) -> list[list[int]]:
    answers = []
    with rounded_caches(kv, index, ROPE_DIMS), torch.no_grad():
        for prompt in prompts():
            ids = torch.tensor([prompt])
            given = original().generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
            answers.append(given[0, len(prompt) :].tolist())
    return answers


def test_each_format_has_logits_of_its_own() -> None:
    """Else equal tokens would say nothing of the format."""
    found = []
    for words in (("auto", "auto"), ("bf16", "auto"), ("fp8_ds_mla", "auto"), ("auto", "fp8"), ("auto", "mxfp4")):
        with rounded_caches(*words, ROPE_DIMS), torch.no_grad():
            found.append(original()(torch.tensor([prompts()[1]]), use_cache=True).logits)
    assert all((one - other).abs().max() > 0.01 for one, other in combinations(found, 2))


def serve(words: tuple[str, str], runner_type: type[ModelRunner], options: dict[str, str] | None) -> list[list[int]]:
    swapped = swap_attention(original(), kv_cache_dtype=words[0], index_cache_dtype=words[1])
    model: Any = swapped
    if options is not None:
        model = torch.compile(swapped, backend="dsv4_piecewise", dynamic=True, options={**options, "max_tokens": 64})
    runner = runner_type(
        model,
        swapped.config,
        **{**LIMITS, "max_num_batched_tokens": 64},
        attention=swapped,
        buckets=BUCKETS if options else None,
    )
    if options is None:
        return runner.generate(prompts(), NEW_TOKENS)

    def arguments(size: int) -> tuple[Tensor, Tensor, StepState]:
        inputs = runner.padding_inputs(size)
        return inputs.input_ids, inputs.positions, inputs.step

    dsv4_compile.capture(model, arguments, BUCKETS, progress=False)
    with counters.expect(captures=0, recaptures=0, uncaptured_calls=0):
        return runner.generate(prompts(), NEW_TOKENS)


@pytest.mark.sampled(16)
@formats
@pytest.mark.parametrize("runner_type", RUNNERS)
def test_eager_tokens_are_those_of_transformers_with_rounded_caches(
    words: tuple[str, str], runner_type: type[ModelRunner]
) -> None:
    assert serve(words, runner_type, None) == tokens_of_transformers(*words)


@pytest.mark.exhaustive
@formats
@pytest.mark.parametrize(("runner", "region"), [("mrv1", "wide"), ("mrv1", "minimal"), ("mrv2", "narrow")])
def test_captured_tokens_are_those_of_transformers_with_rounded_caches(
    words: tuple[str, str], runner: str, region: str
) -> None:
    runner_type = ModelRunnerV1 if runner == "mrv1" else ModelRunnerV2
    served = serve(words, runner_type, {"runner": runner, "region": region})
    assert served == tokens_of_transformers(*words)


@torch.no_grad()
@pytest.mark.parametrize("words", [("fp8_ds_mla", "mxfp4"), ("fp8_ds_mla", "fp8"), ("bf16", "bf16")], ids="+".join)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_one_layer_equals_transformers_with_rounded_caches(ratio: int, words: tuple[str, str]) -> None:
    model = random_hf_model(tiny_hf_config((ratio,)), seed=ratio)
    hidden = torch.randn(300, 48, generator=torch.Generator().manual_seed(1))
    ours = our_layer(swap_attention(model, kv_cache_dtype=words[0], index_cache_dtype=words[1]), hidden, 37)
    theirs = rounded_layer(model, hidden, words)
    # where a value lies between two codes within the rounding of fp32, one of the two may take the other code
    near = (ours - theirs).abs().amax(dim=1) < 1e-5
    assert near.float().mean() > 0.95
    assert (ours - theirs).norm() < 0.01 * theirs.norm()
    assert (theirs - hf_layer(model, hidden)).norm() > 0.001 * theirs.norm()


def rounded_layer(model: DeepseekV4ForCausalLM, hidden: Tensor, words: tuple[str, str]) -> Tensor:
    """A layer of transformers with caches, without which nothing is stored and so nothing rounded."""
    with rounded_caches(*words, ROPE_DIMS):
        return hf_layer(model, hidden, DynamicCache(config=model.config))


def test_load_takes_the_formats(tmp_path: Path) -> None:
    original().save_pretrained(tmp_path)
    loaded = load(tmp_path, kv_cache_dtype="fp8_ds_mla", index_cache_dtype="mxfp4")
    assert isinstance(loaded, SwappedModel)
    assert (loaded.config.kv_cache_dtype, loaded.config.index_cache_dtype) == ("fp8_ds_mla", "mxfp4")
    prompt = prompts()[0]
    answer = ModelRunnerV1(loaded, loaded.config, **LIMITS).generate([prompt], NEW_TOKENS)
    assert answer == tokens_of_transformers("fp8_ds_mla", "mxfp4")[:1]
    with pytest.raises(UnsupportedConfigError, match="index_cache_dtype 'fp4' is not supported: did you mean 'mxfp4'"):
        load(tmp_path, index_cache_dtype="fp4")
