"""Caches by format: pages as of the released models, which caches a layer takes, and that it reads what it wrote."""

import dataclasses
import re

import pytest
import torch
from paging import Paging, tiny_config

from dsv4_compile.errors import CacheBindingError, UnsupportedConfigError
from dsv4_compile.models.deepseek_v4 import (
    AttentionStack,
    DeepseekV4Attention,
    DeepseekV4Config,
    LayerKind,
    allocate_caches,
    bind_caches,
    bytes_per_token,
    cache_bytes,
    layer_cache_specs,
)
from dsv4_compile.runners import ModelRunnerV1

BLOCKS = {"swa": 3, "compressed": 5, "c4_state": 7, "c128_state": 11}
# (kind, cache): bytes of a page in bf16; in fp8_ds_mla with an fp8 indexer; and with an mxfp4 one
PAGES = {
    (LayerKind.SWA, "swa_cache"): (65536, 37440, 37440),
    (LayerKind.C4A, "swa_cache"): (65536, 37440, 37440),
    (LayerKind.C4A, "kv_cache"): (65536, 37440, 37440),
    (LayerKind.C4A, "indexer_k_cache"): (16384, 8640, 4608),
    (LayerKind.C4A, "state_cache"): (32768, 32832, 32832),
    (LayerKind.C4A, "indexer_state_cache"): (8192, 8640, 8640),
    (LayerKind.C128A, "swa_cache"): (65536, 37440, 37440),
    (LayerKind.C128A, "kv_cache"): (2048, 1728, 1728),
    (LayerKind.C128A, "state_cache"): (32768, 32832, 32832),
}
WORDS = (("bf16", "bf16"), ("fp8_ds_mla", "fp8"), ("fp8_ds_mla", "mxfp4"))


@pytest.mark.parametrize(("kind", "cache"), PAGES)
@pytest.mark.parametrize("index", range(3), ids=["bf16", "fp8", "mxfp4"])
def test_pages_are_those_of_the_released_models(kind, cache, index):
    config = DeepseekV4Config.flash(kv_cache_dtype=WORDS[index][0], index_cache_dtype=WORDS[index][1])
    spec = next(spec for spec in layer_cache_specs(config, kind) if spec.name == cache)
    assert spec.page_bytes(torch.bfloat16) == PAGES[kind, cache][index]
    rows = {"swa_cache": 64, "kv_cache": 256 // (kind.value or 1), "indexer_k_cache": 64}
    assert spec.rows == rows.get(cache, 4 if kind is LayerKind.C4A else 8)


@pytest.mark.parametrize(("kv", "index"), WORDS)
def test_whole_pages_are_allocated_and_a_cache_is_no_view(kv, index):
    config = DeepseekV4Config.flash(num_hidden_layers=4)
    layers = allocate_caches(config, BLOCKS, device="meta", kv_cache_dtype=kv, index_cache_dtype=index)
    column = WORDS.index((kv, index))
    total = 0
    for layer_idx, caches in enumerate(layers):
        kind = config.kind(layer_idx)
        for spec in layer_cache_specs(config, kind):
            cache, page = getattr(caches, spec.name), PAGES[kind, spec.name][column]
            assert cache.stride(0) * cache.element_size() == page
            assert cache.untyped_storage().nbytes() == BLOCKS[spec.group] * page
            assert cache._base is None
            total += BLOCKS[spec.group] * page
    assert cache_bytes(layers) == total


def test_bytes_of_a_token_are_those_of_the_pages_that_stay():
    # 21 C4A layers: a page of entries and one of index keys for 256 tokens; 20 C128A layers: a page of entries
    expected = [(21 * (entry + index) + 20 * other) / 256 for entry, index, other in
                ((65536, 16384, 2048), (37440, 8640, 1728), (37440, 4608, 1728))]  # fmt: skip
    flash = DeepseekV4Config.flash()
    assert [bytes_per_token(flash.with_cache_dtypes(*words)) for words in WORDS] == expected == [6880, 3915, 3584.25]


def test_the_arguments_of_allocate_caches_win_over_the_configuration():
    config = tiny_config((4,), kv_cache_dtype="bf16")
    (caches,) = allocate_caches(config, BLOCKS, kv_cache_dtype="fp8_ds_mla", index_cache_dtype=torch.bfloat16)
    assert caches.swa_cache.dtype is caches.kv_cache.dtype is torch.uint8
    assert caches.indexer_k_cache.dtype is torch.bfloat16
    with pytest.raises(UnsupportedConfigError, match="index_cache_dtype 'fp4' is not supported: did you mean 'mxfp4'"):
        allocate_caches(config, BLOCKS, index_cache_dtype="fp4")


def bind(words, given, ratio=4):
    """A layer whose configuration has some words, with caches of other ones."""
    layer = DeepseekV4Attention(tiny_config((ratio,)).with_cache_dtypes(*words), 0)
    bind_caches(
        layer, allocate_caches(tiny_config((ratio,)), BLOCKS, kv_cache_dtype=given[0], index_cache_dtype=given[1])
    )
    return layer


@pytest.mark.parametrize("given", [("auto", "auto"), ("bf16", "mxfp4"), ("fp8_ds_mla", "auto"), ("fp8_ds_mla", "fp8")])
def test_a_layer_that_leaves_it_open_takes_caches_of_any_format(given):
    layer = bind(("auto", "auto"), given)
    assert layer.kv_format == ("fp8_ds_mla" if given[0] == "fp8_ds_mla" else "auto")
    assert layer.indexer.k_format == ("auto" if given[1] == "auto" else given[1])
    bind_caches(layer, allocate_caches(tiny_config((4,)), BLOCKS))
    assert (layer.kv_format, layer.indexer.k_format) == ("auto", "auto")


WRONG = [
    (("fp8_ds_mla", "auto"), ("bf16", "auto"), "swa_cache is torch.bfloat16 [3, 64, 20]; 'fp8_ds_mla' entries of 20"),
    (("bf16", "auto"), ("fp8_ds_mla", "auto"), "swa_cache is torch.uint8 [3, 64, 36]; 'auto' entries of 20 values"),
    (
        ("bf16", "bf16"),
        ("float32", "bf16"),
        "swa_cache is torch.float32 and not torch.bfloat16 (kv_cache_dtype 'bf16')",
    ),
    (("auto", "fp8"), ("auto", "mxfp4"), "indexer_k_cache is torch.uint8 [5, 64, 11]; 'fp8' entries of 14 values take"),
    (("auto", "mxfp4"), ("auto", "auto"), "indexer_k_cache is torch.float32 [5, 64, 14]; 'mxfp4' entries of 14 values"),
]


@pytest.mark.parametrize(("words", "given", "message"), WRONG)
def test_a_layer_that_names_a_format_takes_no_other(words, given, message):
    with pytest.raises(CacheBindingError, match=re.escape(f"attention layer 0 (C4A): {message}")) as raised:
        bind(words, given)
    assert str(raised.value).endswith(": allocate the caches with the configuration of the model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swa_cache": torch.zeros(3, 64, 19)}, "swa_cache is torch.float32 [3, 64, 19]"),
        ({"swa_cache": torch.zeros(3, 64 * 20)}, "swa_cache is torch.float32 [3, 1280]"),
        ({"swa_cache": torch.zeros(3, 64, 20, dtype=torch.int32)}, "swa_cache is torch.int32 [3, 64, 20]"),
        ({"swa_cache": torch.zeros(3, 32, 20)}, "swa_cache has blocks of 32 rows and not 64"),
        (
            {"kv_cache": torch.zeros(5, 64, 36, dtype=torch.uint8)},
            "kv_cache is torch.uint8 [5, 64, 36]; 'auto' entries",
        ),
        ({"indexer_k_cache": torch.zeros(5, 64, 36, dtype=torch.uint8)}, "indexer_k_cache is torch.uint8 [5, 64, 36]"),
        (
            {"state_cache": torch.zeros(7, 4, 80, dtype=torch.bfloat16)},
            "state_cache is torch.bfloat16 and not torch.float32",
        ),
        (
            {"indexer_state_cache": torch.zeros(7, 4, 80)},
            "indexer_state_cache is torch.float32 [7, 4, 80]; 'auto' entries",
        ),
    ],
)
def test_caches_of_other_sizes_are_refused(changes, message):
    layer = DeepseekV4Attention(tiny_config((4,)), 0)
    (caches,) = allocate_caches(tiny_config((4,)), BLOCKS)
    with pytest.raises(CacheBindingError, match=re.escape(f"attention layer 0 (C4A): {message}")):
        bind_caches(layer, [dataclasses.replace(caches, **changes)])
    assert layer.swa_cache is None


def test_a_runner_takes_the_formats_too():
    model = AttentionStack(tiny_config((0, 4)))
    limits = {"max_num_reqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32}
    runner = ModelRunnerV1(model, model.config, kv_cache_dtype="fp8_ds_mla", index_cache_dtype="mxfp4", **limits)
    assert [layer.attention.kv_format for layer in model.layers] == ["fp8_ds_mla"] * 2
    assert model.layers[1].attention.indexer.k_format == "mxfp4"
    assert len(runner.generate([[1, 2, 3]], 4)[0]) == 4
    with pytest.raises(
        UnsupportedConfigError, match="kv_cache_dtype 'fp8' is not supported: did you mean 'fp8_ds_mla'"
    ):
        ModelRunnerV1(model, model.config, kv_cache_dtype="fp8", **limits)
    model = AttentionStack(tiny_config((0,), kv_cache_dtype="bf16"))
    with pytest.raises(CacheBindingError, match=r"layer 0 \(SWA\): swa_cache is torch.uint8"):
        ModelRunnerV1(model, model.config, kv_cache_dtype="fp8_ds_mla", **limits)


@torch.no_grad()
@pytest.mark.parametrize(("kv", "index"), [("fp8_ds_mla", "fp8"), ("fp8_ds_mla", "mxfp4"), ("bf16", "mxfp4")])
def test_pages_full_of_nan_never_show_and_padding_changes_nothing(kv, index):
    config = tiny_config((0, 4, 128), kv_cache_dtype=kv, index_cache_dtype=index)
    ids = torch.arange(270) % 97
    logits = []
    for padding in (0, 5):
        stack, paging = AttentionStack(config), Paging(config, [270, 9])
        bind_caches(stack, paging.caches())
        rows = []
        for start, count in ((0, 200), (200, 69), (269, 1)):
            positions, step = paging.step([(0, start, count)], padding=padding)
            given = torch.cat([ids[start : start + count], torch.zeros(padding, dtype=torch.int64)])
            rows.append(stack(given, positions, step)[:count])
        logits.append(torch.cat(rows))
    assert logits[0].isfinite().all()
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
