"""RoPE tables, caches and step state: what they hold, who shares them, what a cast or a move does to them."""

import dataclasses
import re

import pytest
import reference
import torch
from paging import Paging, tiny_config
from torch.utils import _pytree as pytree

from dsv4_compile.errors import CacheBindingError
from dsv4_compile.models.deepseek_v4 import (
    AttentionStack,
    DeepseekV4Attention,
    DeepseekV4Config,
    LayerKind,
    StepState,
    allocate_caches,
    bind_caches,
    build_cos_sin,
    cache_bytes,
    layer_cache_specs,
)

BLOCKS = {"swa": 3, "compressed": 5, "c4_state": 7, "c128_state": 11}


@pytest.mark.parametrize("kind", LayerKind)
def test_tables_hold_cosines_then_sines(kind):
    config = tiny_config()
    table = build_cos_sin(config, kind)
    freqs = reference.frequencies(config, compressed=kind is not LayerKind.SWA)
    angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), freqs).double()
    assert table.shape == (config.max_position_embeddings, config.qk_rope_head_dim)
    torch.testing.assert_close(table.double(), torch.cat([angles.cos(), angles.sin()], 1), rtol=0, atol=1e-6)


def test_yarn_of_the_released_models_ramps_from_dim_15_to_25():
    config = DeepseekV4Config.flash(max_position_embeddings=2)
    plain = dataclasses.replace(config, rope_scaling=None)
    # the angle at position 1 is the frequency; all are below pi / 2
    scaled = build_cos_sin(config, LayerKind.C4A)[1].double()[32:].asin()
    unscaled = build_cos_sin(plain, LayerKind.C4A)[1].double()[32:].asin()
    ratio = unscaled / scaled
    torch.testing.assert_close(ratio[:16], torch.ones(16, dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(ratio[25:], torch.full((7,), 16.0, dtype=torch.float64), rtol=1e-5, atol=0)
    assert (ratio[16:26].diff() > 0).all()
    assert torch.equal(build_cos_sin(config, LayerKind.SWA), build_cos_sin(plain, LayerKind.SWA))


def buffers(model, suffix):
    return [buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name.endswith(suffix)]


def test_layers_share_tables_and_selected_indices_through_casts_and_copies():
    model = AttentionStack(tiny_config(ratios=(0, 4, 128, 4, 0)))
    before = model.layers[1].attention.rotary.cos_sin.clone()
    for changed in (model, model.bfloat16(), model.to(torch.float64)):
        tables = buffers(changed, "cos_sin")
        assert len({table.data_ptr() for table in tables}) == 2  # plain and YaRN
        assert all(table.dtype is torch.float32 for table in tables)
        assert torch.equal(changed.layers[1].attention.rotary.cos_sin, before)
        indices = buffers(changed, "topk.indices")
        assert len(indices) == 2
        assert len({index.data_ptr() for index in indices}) == 1
        assert indices[0].dtype is torch.int32


def test_the_selected_indices_have_a_row_a_token():
    layer = DeepseekV4Attention(tiny_config(ratios=(4,), max_num_batched_tokens=33, index_topk=9), 0)
    assert layer.indexer.topk.indices.shape == (33, 9)


def test_caches_of_the_released_flash_model():
    config = DeepseekV4Config.flash(num_hidden_layers=4)
    swa, _, c4, c128 = allocate_caches(config, BLOCKS, dtype=torch.bfloat16, device="meta")
    assert swa.swa_cache.shape == (3, 64, 512)
    assert swa.kv_cache is swa.state_cache is swa.indexer_k_cache is swa.indexer_state_cache is None
    assert c4.kv_cache.shape == (5, 64, 512)
    assert c4.indexer_k_cache.shape == (5, 64, 128)
    assert c4.state_cache.shape == (7, 4, 2048)
    assert c4.indexer_state_cache.shape == (7, 4, 512)
    assert c128.kv_cache.shape == (5, 2, 512)
    assert c128.state_cache.shape == (11, 8, 1024)
    assert c128.indexer_k_cache is c128.indexer_state_cache is None
    assert {t.dtype for t in (c4.state_cache, c4.indexer_state_cache, c128.state_cache)} == {torch.float32}
    assert {t.dtype for t in (c4.swa_cache, c4.kv_cache, c4.indexer_k_cache)} == {torch.bfloat16}


def test_specs_say_what_is_allocated():
    config = tiny_config(ratios=(0, 4, 128))
    for layer, kind in zip(allocate_caches(config, BLOCKS), LayerKind, strict=True):
        specs = {spec.name: spec for spec in layer_cache_specs(config, kind)}
        held = {name: tensor for name, tensor in vars(layer).items() if tensor is not None}
        assert held.keys() == specs.keys()
        for name, tensor in held.items():
            assert tensor.shape == (BLOCKS[specs[name].group], specs[name].rows, specs[name].width)


def test_cache_bytes_adds_up():
    config = tiny_config(ratios=(0, 128))
    # floats of 4 bytes: two windows, one compressed cache of 2 rows a block, one state cache; a block is a page of
    # bytes, of which there are whole 512
    assert (4 * 64 * 20, 4 * 2 * 20, 4 * 8 * 40) == (10 * 512, 160, 2 * 512 + 256)
    expected = 2 * 3 * 10 * 512 + 5 * 512 + 11 * 3 * 512
    assert cache_bytes(allocate_caches(config, BLOCKS)) == expected


def test_cache_dtype_of_the_configuration_wins():
    caches = allocate_caches(tiny_config(kv_cache_dtype="bfloat16"), BLOCKS, dtype=torch.float32)
    assert caches[1].swa_cache.dtype is torch.bfloat16
    assert caches[1].state_cache.dtype is torch.float32


def test_a_missing_group_is_an_error():
    with pytest.raises(ValueError, match=r"num_blocks has the groups \['swa'\]; it needs \['c128_state', 'c4_state'"):
        allocate_caches(tiny_config(), {"swa": 3})


def test_caches_are_bound_by_layer_index_and_are_no_state():
    model = AttentionStack(tiny_config(ratios=(4, 0)))
    names = set(model.state_dict())
    caches = allocate_caches(model.config, BLOCKS)
    bind_caches(model, caches)
    first, second = (layer.attention for layer in model.layers)
    assert first.swa_cache is caches[0].swa_cache
    assert first.kv_cache is caches[0].kv_cache
    assert first.indexer.k_cache is caches[0].indexer_k_cache
    assert first.compressor.state_cache is caches[0].state_cache
    assert first.indexer.compressor.state_cache is caches[0].indexer_state_cache
    assert second.swa_cache is caches[1].swa_cache
    assert second.kv_cache is None
    assert set(model.state_dict()) == names
    assert sum(name.endswith("cache") for name, _ in model.named_buffers()) == 6


NO_CACHES = "attention layer 0 has no caches: call bind_caches"


def test_calling_without_caches_is_an_error():
    config = tiny_config(ratios=(0,))
    positions, step = Paging(config, [5]).step([(0, 0, 2)])
    with pytest.raises(CacheBindingError, match=NO_CACHES):
        DeepseekV4Attention(config, 0)(torch.zeros(2, config.hidden_size), positions, step)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_without_caches_is_the_same_error(fullgraph):
    config = tiny_config(ratios=(4,))
    positions, step = Paging(config, [5]).step([(0, 0, 2)])
    compiled = torch.compile(DeepseekV4Attention(config, 0), backend="dsv4_piecewise", fullgraph=fullgraph)
    with torch.no_grad(), pytest.raises(CacheBindingError, match=NO_CACHES):
        compiled(torch.zeros(2, config.hidden_size), positions, step)


NEEDED = {
    0: "SWA) needs swa_cache",
    4: "C4A) needs indexer_k_cache, indexer_state_cache, kv_cache, state_cache, swa_cache",
    128: "C128A) needs kv_cache, state_cache, swa_cache",
}


@pytest.mark.parametrize(("ratio", "others"), [(4, 0), (0, 4), (128, 0), (4, 128), (128, 4)])
def test_caches_of_another_kind_of_layer_are_refused_and_the_bound_ones_stay(ratio, others):
    layer = DeepseekV4Attention(tiny_config(ratios=(ratio,)), 0)
    bind_caches(layer, allocate_caches(tiny_config(ratios=(ratio,)), BLOCKS))
    bound = dict(layer.named_buffers())
    wrong = allocate_caches(tiny_config(ratios=(others,)), BLOCKS)
    with pytest.raises(CacheBindingError, match=re.escape(f"layer 0 ({NEEDED[ratio]}, and is given ")):
        bind_caches(layer, wrong)
    assert all(layer.get_buffer(name) is buffer for name, buffer in bound.items())


def test_a_layer_without_an_entry_is_refused_before_any_is_bound():
    model = AttentionStack(tiny_config(ratios=(0, 0)))
    caches = allocate_caches(tiny_config(ratios=(0,)), BLOCKS)
    with pytest.raises(CacheBindingError, match=r"^attention layer 1 has no entry in caches \(length 1\): "):
        bind_caches(model, caches)
    assert model.layers[0].attention.swa_cache is None


def test_step_state_is_a_frozen_pytree_of_tensors():
    _, step = Paging(tiny_config(), [5]).step([(0, 0, 2)])
    leaves, spec = pytree.tree_flatten(step)
    assert len(leaves) == len(dataclasses.fields(StepState)) == 12
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, StepState)
    assert again.block_table is step.block_table
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'block_table'"):
        step.block_table = step.swa_block_table


def test_caches_of_which_one_is_wrong_leave_every_layer_as_it_was():
    stack = AttentionStack(tiny_config((0, 4, 128)))
    config = stack.config
    blocks = {"swa": 4, "compressed": 4, "c4_state": 4, "c128_state": 4}
    right = allocate_caches(config, blocks, device=torch.device("cpu"))
    bind_caches(stack, right)
    wrong = allocate_caches(config, blocks, device=torch.device("cpu"))
    with pytest.raises(CacheBindingError, match="attention layer 2"):
        bind_caches(stack, [*wrong[:2], wrong[0]])
    bound = [layer.attention.swa_cache for layer in stack.layers]
    assert all(cache is given.swa_cache for cache, given in zip(bound, right, strict=True))
