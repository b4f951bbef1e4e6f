"""The attention layer against the naive reference: paged, shuffled, cut into mixed steps, padded, in fp32 and bf16."""

import functools
import random

import pytest
import reference
import torch
from paging import Paging, tiny_config

from dsv4_compile.models.deepseek_v4 import AttentionStack, DeepseekV4Attention, bind_caches, randomise_

LENGTHS = (270, 137, 9, 1)
RATIOS = pytest.mark.parametrize("ratio", [0, 4, 128])


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@functools.cache
def layer_and_inputs(ratio):
    layer = DeepseekV4Attention(tiny_config(ratios=(ratio,)), 0)
    randomise_(layer, seed=ratio)
    generator = torch.Generator().manual_seed(1)
    return layer, [torch.randn(length, 40, generator=generator) for length in LENGTHS]


@functools.cache
def expected(ratio, request):
    layer, inputs = layer_and_inputs(ratio)
    weights = {name: value.double() for name, value in layer.state_dict().items()}
    return reference.attention_layer(inputs[request].double(), weights, tiny_config(ratios=(ratio,)), ratio)


def random_schedule(seed):
    """Steps of (request, start, count) spans that advance the requests in any order, by one or many tokens."""
    rng = random.Random(seed)
    done = [0] * len(LENGTHS)
    steps = []
    while any(have < length for have, length in zip(done, LENGTHS, strict=True)):
        open_requests = [r for r, length in enumerate(LENGTHS) if done[r] < length]
        spans = []
        for request in rng.sample(open_requests, rng.randint(1, len(open_requests))):
            count = rng.choice([1, 2, 3, rng.randint(1, 150)])
            count = min(count, LENGTHS[request] - done[request])
            spans.append((request, done[request], count))
            done[request] += count
        steps.append(spans)
    return steps


def run(layer, inputs, schedule, *, seed=0, padding=0, dtype=torch.float32):
    """The outputs of every request, after running the schedule over caches full of NaN."""
    paging = Paging(tiny_config(ratios=(layer.kind.value,)), LENGTHS, seed=seed)
    bind_caches(layer, paging.caches(dtype))
    outputs = [torch.zeros_like(x, dtype=dtype) for x in inputs]
    for spans in schedule:
        positions, step = paging.step(spans, padding=padding)
        rows = [inputs[r][start : start + count] for r, start, count in spans]
        tail = torch.full((padding, inputs[0].shape[1]), float("nan"), dtype=dtype)
        out = layer(torch.cat([*rows, tail]), positions, step)
        for (request, start, count), part in zip(
            spans, out[: len(positions) - padding].split([s[2] for s in spans]), strict=True
        ):
            outputs[request][start : start + count] = part
    return outputs


@RATIOS
def test_one_prefill(ratio):
    layer, inputs = layer_and_inputs(ratio)
    outputs = run(layer, inputs, [[(r, 0, length) for r, length in enumerate(LENGTHS)]])
    for request, out in enumerate(outputs):
        torch.testing.assert_close(out.double(), expected(ratio, request), rtol=1e-6, atol=1e-6)


@RATIOS
@pytest.mark.parametrize("seed", range(4))
def test_mixed_steps_over_shuffled_blocks(ratio, seed):
    layer, inputs = layer_and_inputs(ratio)
    outputs = run(layer, inputs, random_schedule(seed), seed=seed, padding=seed * 3)
    for request, out in enumerate(outputs):
        torch.testing.assert_close(out.double(), expected(ratio, request), rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(2)
@RATIOS
def test_token_by_token(ratio):
    layer, inputs = layer_and_inputs(ratio)
    schedule = [
        [(r, position, 1) for r, length in enumerate(LENGTHS) if position < length] for position in range(max(LENGTHS))
    ]
    for request, out in enumerate(run(layer, inputs, schedule)):
        torch.testing.assert_close(out.double(), expected(ratio, request), rtol=1e-6, atol=1e-6)


@RATIOS
def test_every_parameter_matters(ratio):
    layer, inputs = layer_and_inputs(ratio)
    schedule = [[(0, 0, LENGTHS[0])]]
    before = run(layer, inputs, schedule)[0]
    for parameter in layer.parameters():
        kept = parameter.clone()
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        assert not torch.allclose(run(layer, inputs, schedule)[0], before, atol=1e-3)
        parameter.copy_(kept)


@RATIOS
def test_padded_tokens_get_zero(ratio):
    layer, inputs = layer_and_inputs(ratio)
    paging = Paging(tiny_config(ratios=(ratio,)), LENGTHS)
    bind_caches(layer, paging.caches())
    positions, step = paging.step([(0, 0, 6)], padding=2)
    out = layer(torch.cat([inputs[0][:6], torch.full((2, 40), float("nan"))]), positions, step)
    assert (out[6:] == 0).all()


@pytest.mark.parametrize(
    ("ratio", "topk", "inject"),
    [(0, 7, False), (128, 7, False), (4, 80, False), (4, 7, True)],
    ids=["swa", "c128", "c4-everything-selected", "c4-same-selection"],
)
def test_bf16(ratio, topk, inject):
    # rounding flips near-equal scores, so C4A is compared where the selection is the same
    config = tiny_config(ratios=(ratio,), index_topk=topk)
    layer = DeepseekV4Attention(config, 0)
    randomise_(layer, seed=ratio)
    layer.bfloat16()
    inputs = [x.bfloat16() for x in layer_and_inputs(ratio)[1]]
    out = run(layer, inputs, [[(0, 0, LENGTHS[0])]], dtype=torch.bfloat16)[0]
    assert out.dtype is torch.bfloat16
    select = None
    if inject:
        selected = layer.indexer.topk.indices.tolist()

        def select(position, scores):
            return [block for block in selected[position] if block >= 0]

    weights = {name: value.double() for name, value in layer.state_dict().items()}
    wanted = reference.attention_layer(inputs[0].double(), weights, config, ratio, select)
    assert (out.double() - wanted).norm() / wanted.norm() < 0.007


@pytest.mark.parametrize("ratio", [0, 128])
def test_layers_without_an_indexer_give_none(ratio):
    layer, inputs = layer_and_inputs(ratio)
    paging = Paging(tiny_config(ratios=(ratio,)), LENGTHS)
    bind_caches(layer, paging.caches())
    positions, step = paging.step([(0, 0, 6)])
    index = layer.prepare_index(torch.randn(6, 28), layer.run_input_projections(inputs[0][:6]), positions, step)
    assert index == (None, None, None)
    assert layer.select_blocks(index, positions, step) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("span", [(0, 0, 6), (0, 0, 1), (0, 0, 200)])
def test_the_indexer_gives_queries_no_scale_and_weights(span, dtype):
    config = tiny_config(ratios=(4,))
    layer = DeepseekV4Attention(config, 0).to(dtype)
    paging = Paging(config, LENGTHS)
    bind_caches(layer, paging.caches(dtype))
    positions, step = paging.step([span])
    count = span[2]
    projections = layer.run_input_projections(torch.randn(count, 40, dtype=dtype))
    qr = torch.randn(count, 28, dtype=dtype)
    index = layer.indexer(qr, projections.index_weights, projections.index_kv_score, positions, step)
    assert type(index) is tuple
    index_q, index_q_scale, index_weights = index
    assert (index_q.shape, index_q.dtype) == ((count, 64, 14), dtype)
    assert index_q_scale is None
    assert (index_weights.shape, index_weights.dtype) == ((count, 64), torch.float32)


def test_layers_of_a_model_select_into_one_buffer():
    model = AttentionStack(tiny_config(ratios=(4, 128, 4)))
    paging = Paging(model.config, LENGTHS)
    bind_caches(model, paging.caches())
    first, _, last = (layer.attention for layer in model.layers)
    assert first.indexer.topk.indices is last.indexer.topk.indices
    positions, step = paging.step([(0, 0, 9)])
    model(torch.arange(9), positions, step)
    # 9 tokens complete 2 blocks, and rows of later tokens stay as they were made
    assert first.indexer.topk.indices[8].tolist() == [0, 1, -1, -1, -1, -1, -1]
    assert (first.indexer.topk.indices[9:] == -1).all()


def test_a_step_without_tokens():
    model = AttentionStack(tiny_config(ratios=(0, 4, 128)))
    paging = Paging(model.config, LENGTHS)
    bind_caches(model, paging.caches())
    positions, step = paging.step([])
    assert model(torch.zeros(0, dtype=torch.int64), positions.to(torch.int64), step).shape == (0, 97)


def test_a_stack_is_the_same_for_the_same_seed_and_prefill_equals_decode():
    config = tiny_config(ratios=(0, 4, 128, 4))
    model, again, other = AttentionStack(config), AttentionStack(config), AttentionStack(config, seed=1)
    ids = torch.arange(40) % 97
    whole, single = [], []
    for stack in (model, again, other):
        paging = Paging(config, LENGTHS)
        bind_caches(stack, paging.caches())
        whole.append(stack(ids, *paging.step([(0, 0, 40)])))
    assert torch.equal(whole[0], whole[1])
    assert not torch.allclose(whole[0], whole[2], atol=0.1)
    for position in range(40):
        positions, step = paging.step([(1, position, 1)])
        single.append(other(ids[position : position + 1], positions, step))
    torch.testing.assert_close(torch.cat(single), whole[2], rtol=0, atol=1e-5)
