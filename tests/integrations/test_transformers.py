"""Our attention in a Hugging Face model: the same numbers, the same weights, and checkpoints of every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_layers import LIMITS, RUNNERS, hf_layer, make_prompts, our_layer
from hf_models import YARN, random_hf_model, save_as_released, tiny_hf_config
from torch import Tensor, fx, nn
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from dsv4_compile import counters
from dsv4_compile.errors import UnsupportedConfigError
from dsv4_compile.integrations.transformers import SwappedModel, load, swap_attention
from dsv4_compile.models.deepseek_v4 import DeepseekV4Attention, StepState
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2

LENGTHS = (1, 3, 4, 5, 7, 8, 127, 128, 129, 255, 256, 300)


@pytest.fixture(scope="module")
def hf_model() -> DeepseekV4ForCausalLM:
    return random_hf_model(tiny_hf_config())


@pytest.fixture(scope="module")
def swapped(hf_model: DeepseekV4ForCausalLM) -> SwappedModel:
    return swap_attention(hf_model)


@pytest.fixture(scope="module")
def prompts_and_hf_answers(hf_model: DeepseekV4ForCausalLM) -> tuple[list[list[int]], list[list[int]]]:
    prompts = make_prompts(3, 150, 1, 64, 129)
    generated = [hf_model.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False)[0] for p in prompts]
    return prompts, [tokens[len(p) :].tolist() for tokens, p in zip(generated, prompts, strict=True)]


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_one_layer_equals_transformers(ratio: int) -> None:
    model = random_hf_model(tiny_hf_config((ratio,)), seed=ratio)
    swapped = swap_attention(model)
    generator = torch.Generator().manual_seed(1)
    for length in LENGTHS:
        hidden = torch.randn(length, 48, generator=generator)
        expected = hf_layer(model, hidden)
        for chunk in (300, 37):
            torch.testing.assert_close(our_layer(swapped, hidden, chunk), expected, rtol=0, atol=1e-5)


# each without an attention factor of its own, so that transformers makes one, or with one
SCALED = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn 0.8": {"rope_type": "yarn", **YARN, "attention_factor": 0.8},
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_one_layer_with_scaled_rope_equals_transformers(ratio: int, name: str) -> None:
    own = {"partial_rotary_factor": 0.25, **SCALED[name]}
    parameters = {"main": {**own, "rope_theta": 500.0}, "compress": {**own, "rope_theta": 7000.0}}
    model = random_hf_model(tiny_hf_config((ratio,), rope_parameters=parameters), seed=ratio)
    hidden = torch.randn(300, 48, generator=torch.Generator().manual_seed(1))
    expected = hf_layer(model, hidden)
    torch.testing.assert_close(our_layer(swap_attention(model), hidden, 37), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_one_layer_in_bfloat16_is_near_the_fp32_one(ratio: int) -> None:
    # index_topk covers every block: rounding would flip a selection, and the layer with it (8 % instead of 0.7 %)
    model = random_hf_model(tiny_hf_config((ratio,), index_topk=80), seed=ratio).to(torch.bfloat16)
    hidden = torch.randn(300, 48, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ours = our_layer(swap_attention(model), hidden, 300)
    expected = hf_layer(model.float(), hidden.float())
    assert ours.dtype is torch.bfloat16
    assert (ours.float() - expected).norm() / expected.norm() < 0.015


@torch.no_grad()
def test_all_logits_equal_those_of_transformers(hf_model: DeepseekV4ForCausalLM, swapped: SwappedModel) -> None:
    tokens = make_prompts(300)[0]
    expected = hf_model(torch.tensor([tokens])).logits[0]
    calls = []

    def keep(input_ids: Tensor, positions: Tensor, step: StepState) -> Tensor:
        calls.append(swapped(input_ids, positions, step))
        return calls[-1]

    ModelRunnerV1(keep, swapped.config, attention=swapped, **LIMITS).generate([tokens], 1)
    torch.testing.assert_close(calls[0], expected, rtol=0, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("buckets", [None, (4, 64)])
@pytest.mark.parametrize("runner_type", RUNNERS)
def test_the_greedy_tokens_are_those_of_transformers(
    prompts_and_hf_answers: tuple[list[list[int]], list[list[int]]],
    swapped: SwappedModel,
    runner_type: type[ModelRunner],
    buckets: tuple[int, ...] | None,
) -> None:
    prompts, expected = prompts_and_hf_answers
    runner = runner_type(swapped, swapped.config, **{**LIMITS, "max_num_batched_tokens": 64}, buckets=buckets)
    assert runner.generate(prompts, 12) == expected


def test_transformers_makes_neither_mask_nor_cache(swapped: SwappedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("wasted work")

    monkeypatch.setattr(modeling_deepseek_v4, "create_sliding_window_causal_mask", fail)
    monkeypatch.setattr(modeling_deepseek_v4, "DynamicCache", fail)
    ModelRunnerV1(swapped, swapped.config, **LIMITS).generate([[1, 2, 3]], 2)


def test_the_original_model_is_left_as_it_was() -> None:
    model = random_hf_model(tiny_hf_config())
    tokens = torch.tensor(make_prompts(140))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(tokens).logits
        swap_attention(model)
        assert torch.equal(model(tokens).logits, before)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert not any(isinstance(module, DeepseekV4Attention) for module in model.modules())


def storages(module: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}


def test_weights_are_shared_both_ways() -> None:
    model = random_hf_model(tiny_hf_config())
    swapped = swap_attention(model)
    assert storages(model) == storages(swapped)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(len(name))
        assert all(
            (parameter == parameter.flatten()[0]).all() or "fused" in n for n, parameter in swapped.named_parameters()
        )
        theirs, ours = model.model.layers[1].self_attn, swapped.language_model.model.layers[1].self_attn.attention
        assert ours.fused_wqa_wkv.weight[:24].unique().item() == len("model.layers.1.self_attn.q_a_proj.weight")
        assert ours.fused_wqa_wkv.weight[24:].unique().item() == len("model.layers.1.self_attn.kv_proj.weight")
        for parameter in swapped.parameters():
            parameter.fill_(7)
        assert theirs.compressor.indexer.gate_proj.weight.unique().item() == 7
        assert all((parameter == 7).all() for parameter in model.parameters())


def test_a_second_swap_shares_the_same_storage() -> None:
    model = random_hf_model(tiny_hf_config())
    first = swap_attention(model)
    assert storages(swap_attention(model)) == storages(first) == storages(model)


def test_a_swapped_model_can_still_be_saved(tmp_path: Path) -> None:
    model = random_hf_model(tiny_hf_config())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    swap_attention(model)
    model.save_pretrained(tmp_path / "saved")
    loaded = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())


# checkpoints


@pytest.mark.parametrize("layout", ["save_pretrained", "transformers names", "released"])
def test_a_checkpoint_of_any_layout_is_served(
    hf_model: DeepseekV4ForCausalLM, swapped: SwappedModel, tmp_path: Path, layout: str
) -> None:
    folder = tmp_path / "checkpoint"
    if layout == "released":
        save_as_released(hf_model, folder)
    else:
        hf_model.save_pretrained(folder, save_original_format=layout == "save_pretrained")
    loaded = load(folder)
    assert loaded.config == swapped.config
    expected = dict(swapped.state_dict())
    assert expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    prompts = make_prompts(5, 130)
    answers = [ModelRunnerV2(model, model.config, **LIMITS).generate(prompts, 4) for model in (swapped, loaded)]
    assert answers[0] == answers[1]


def test_load_takes_overrides_and_dtype(hf_model: DeepseekV4ForCausalLM, tmp_path: Path) -> None:
    hf_model.save_pretrained(tmp_path / "checkpoint")
    loaded = load(
        tmp_path / "checkpoint", dtype=torch.bfloat16, max_position_embeddings=64, experts_implementation="eager"
    )
    assert loaded.config.max_position_embeddings == 64
    assert loaded.language_model.config._experts_implementation == "eager"
    attention = loaded.language_model.model.layers[1].self_attn.attention
    assert attention.fused_wqa_wkv.weight.dtype is torch.bfloat16
    assert attention.q_norm.dtype is attention.compressor.ape.dtype is torch.float32
    assert attention.rotary.cos_sin.shape == (64, 8)


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    config = {**tiny_hf_config().to_dict(), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint folder at .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"config\.json has model_type 'llama'; only 'deepseek_v4' is served"),
        ({"model_type": None}, "has model_type None"),
        ({"dtype": "float33"}, "has dtype 'float33', which torch does not have"),
        ({"compress_ratios": [0, 4, 16, 4]}, "layer 2 has compression ratio 16"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 4 layers"),
        ({"o_groups": 3}, "num_attention_heads 4 is not a multiple of o_groups 3"),
    ],
)
def test_a_configuration_we_cannot_serve_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        load(write_config(tmp_path / "checkpoint", **changes))


def test_a_quantised_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match="kv_cache_dtype 'fp8' is not supported"):
        load(write_config(tmp_path / "checkpoint"), kv_cache_dtype="fp8")


def test_missing_weights_are_an_error_not_random_numbers(hf_model: DeepseekV4ForCausalLM, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    kept = {name: value for name, value in hf_model.state_dict().items() if "layers.2.self_attn.sinks" not in name}
    hf_model.save_pretrained(folder, state_dict=kept)
    with pytest.raises(UnsupportedConfigError, match=r"lacks 1 weights, for example .*layers\.2\.self_attn\.sinks"):
        load(folder)


def test_only_a_plain_deepseek_model_is_swapped() -> None:
    with pytest.raises(UnsupportedConfigError, match="takes a DeepseekV4ForCausalLM, not a Linear"):
        swap_attention(nn.Linear(2, 2))
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(tiny_hf_config())
    with pytest.raises(UnsupportedConfigError, match=r"spread over \['meta'\]"):
        swap_attention(model)
    model = random_hf_model(tiny_hf_config())
    model.model.layers[0].forward = model.model.layers[0].forward
    with pytest.raises(UnsupportedConfigError, match=r"model\.layers\.0 has hooks around its forward"):
        swap_attention(model)


def test_quantised_weights_are_refused() -> None:
    model = random_hf_model(tiny_hf_config())
    model.model.layers[0].self_attn.q_b_proj.weight_scale_inv = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedConfigError, match=r"layers\.0\.self_attn\.q_b_proj is quantised"):
        swap_attention(model)


def test_weights_of_two_dtypes_cannot_be_fused() -> None:
    model = random_hf_model(tiny_hf_config())
    model.model.layers[0].self_attn.kv_proj.half()
    with pytest.raises(UnsupportedConfigError, match=r"dtypes torch\.float32 and torch\.float16"):
        swap_attention(model)


# compilation


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")  # transformers' own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("runner_type", RUNNERS)
def test_a_checkpoint_is_served_with_the_default_experts(
    runner_type: type[ModelRunner], dtype: torch.dtype, tmp_path: Path
) -> None:
    """transformers' grouped experts read the routing on the host where torch has no kernel for them."""
    save_as_released(random_hf_model(tiny_hf_config((4, 128))), tmp_path / "checkpoint")
    model = load(tmp_path / "checkpoint", dtype=dtype)
    prompts = make_prompts(40, 6, 20)
    expected = runner_type(model, model.config, **LIMITS).generate(prompts, 6)
    options = {"runner": "mrv1" if runner_type is ModelRunnerV1 else "mrv2"}
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=options)
    for _ in range(2):
        assert runner_type(compiled, model.config, **LIMITS, attention=model).generate(prompts, 6) == expected
    assert counters.graphs_compiled <= 2
    assert counters.replans <= counters.graphs_compiled
    assert counters.replays > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("runner_type", RUNNERS)
def test_the_swapped_model_is_one_graph(runner_type: type[ModelRunner], experts: str) -> None:
    swapped = swap_attention(random_hf_model(tiny_hf_config((4, 128), experts_implementation=experts)))
    prompts = make_prompts(40, 6, 20)
    expected = runner_type(swapped, swapped.config, **LIMITS).generate(prompts, 4)
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(swapped, backend=keep, fullgraph=True, dynamic=True)
    runner = runner_type(compiled, swapped.config, **{**LIMITS, "max_num_batched_tokens": 32}, buckets=(2, 8, 16))
    assert runner.generate(prompts, 4) == expected
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets.count("dsv4.forward_mqa") == 2
    assert targets.count("dsv4.sparse_indexer") == 1
    inputs = [node.name for node in graphs[0].graph.nodes if node.op == "placeholder"]
    for field in ("swa_slot_mapping", "c4_slot_mapping", "c128_state_block_table", "token_to_req"):
        assert sum(field in name for name in inputs) == 1, field
