"""The MTP block of a checkpoint: its weights under every name, its numbers as the formula has them, its drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_layers import LIMITS, RUNNERS, make_prompts
from hf_models import random_hf_model, save_as_released, tiny_hf_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import dsv4_compile
from dsv4_compile import MemoryPool, counters
from dsv4_compile.errors import UnsupportedConfigError
from dsv4_compile.integrations.transformers import SwappedModelWithMTP, load, load_original, swap_attention
from dsv4_compile.integrations.transformers_mtp import WithMTP
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2


def random_with_mtp(ratios: tuple[int, ...] = (0, 4, 128, 4)) -> WithMTP:
    """The next token hangs mostly on the last one, and so does its draft, so that some drafts hit."""
    config = tiny_hf_config(ratios, hc_sinkhorn_iters=3, experts_implementation="batched_mm")
    model = random_hf_model(config, kind=WithMTP)
    with torch.no_grad():
        block = model.mtp[0]
        model.model.embed_tokens.weight.mul_(40)
        block.e_proj.weight.copy_(50 * torch.eye(config.hidden_size))
        block.enorm.weight.fill_(1)
        block.kv_norm.weight.copy_(model.model.norm.weight)
    return model


@pytest.fixture(scope="module")
def original() -> WithMTP:
    return random_with_mtp()


@pytest.fixture(scope="module")
def swapped(original: WithMTP) -> SwappedModelWithMTP:
    model = swap_attention(original)
    assert isinstance(model, SwappedModelWithMTP)
    return model


# checkpoints


def save(model: WithMTP, folder: Path, layout: str) -> None:
    """In a layout; "under model" has the block's names where transformers would put them, had it the block."""
    if layout == "released":
        save_as_released(model, folder)
        return
    model.save_pretrained(folder, save_original_format=layout == "save_pretrained")
    if layout == "under model":
        weights = load_file(folder / "model.safetensors")
        renamed = {f"model.{name}" if name.startswith("mtp.") else name: value for name, value in weights.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("layout", ["released", "save_pretrained", "transformers names", "under model"])
def test_the_block_is_loaded_from_every_layout(
    original: WithMTP, swapped: SwappedModelWithMTP, tmp_path: Path, layout: str
) -> None:
    save(original, tmp_path / "checkpoint", layout)
    loaded = load(tmp_path / "checkpoint", mtp=True)
    assert loaded.config == swapped.config
    assert loaded.config.compress_ratios == (0, 4, 128, 4, 0)
    expected = dict(swapped.state_dict())
    assert expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert load(tmp_path / "checkpoint").drafter is None


def test_a_new_model_has_every_weight_made() -> None:
    block = WithMTP(tiny_hf_config((0,))).mtp[0]
    assert all(parameter.isfinite().all() and parameter.abs().max() < 10 for parameter in block.parameters())
    assert block.hc_head_scale.tolist() == [1.0]
    assert not block.hc_head_base.any()
    assert 0.01 < block.hc_head_fn.std() < 0.03


def test_the_names_of_released_files_are_those(original: WithMTP, tmp_path: Path) -> None:
    save_as_released(original, tmp_path / "checkpoint")
    names = {name for name in load_file(tmp_path / "checkpoint" / "model.safetensors") if name.startswith("mtp.")}
    assert {name for name in names if ".experts." not in name} == {
        f"mtp.0.{name}"
        for name in (
            *("e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight"),
            *("hc_head_fn", "hc_head_base", "hc_head_scale", "attn_norm.weight", "ffn_norm.weight"),
            *(f"hc_{part}_{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")),
            *("attn.wq_a.weight", "attn.q_norm.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.kv_norm.weight"),
            *("attn.wo_a.weight", "attn.wo_b.weight", "attn.attn_sink", "ffn.gate.weight", "ffn.gate.bias"),
            *(f"ffn.shared_experts.w{number}.weight" for number in (1, 2, 3)),
        )
    }
    assert "mtp.0.ffn.experts.7.w2.weight" in names


def test_the_dtypes_are_those_of_a_layer(original: WithMTP, tmp_path: Path) -> None:
    original.save_pretrained(tmp_path / "checkpoint")
    drafter = load(tmp_path / "checkpoint", mtp=True, dtype=torch.bfloat16).drafter
    assert drafter is not None
    weights = dict(drafter.named_parameters(remove_duplicate=False))
    assert weights["e_proj.weight"].dtype is weights["h_proj.weight"].dtype is torch.bfloat16
    for name in ("enorm.weight", "hnorm.weight", "norm.weight", "head.head.hc_fn", "block.layer.attn_hc.fn"):
        assert weights[name].dtype is torch.float32


def test_embedding_and_head_are_the_models_own(original: WithMTP, swapped: SwappedModelWithMTP) -> None:
    drafter = swapped.drafter
    assert drafter.embedding.weight is original.model.embed_tokens.weight  # type: ignore[attr-defined]
    assert drafter.lm_head.weight is original.lm_head.weight  # type: ignore[attr-defined]
    storages = [{p.untyped_storage().data_ptr() for p in model.parameters()} for model in (original, swapped)]
    assert storages[0] == storages[1]


def drop(folder: Path, *, but: int) -> None:
    """Leave out the weights of the block, but the first few."""
    weights = load_file(folder / "model.safetensors")
    block = sorted(name for name in weights if "mtp." in name)
    kept = {name: value for name, value in weights.items() if name not in block[but:]}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_without_the_block_is_refused(original: WithMTP, tmp_path: Path) -> None:
    save_as_released(original, folder := tmp_path / "checkpoint")
    drop(folder, but=0)
    load(folder)
    with pytest.raises(UnsupportedConfigError, match=r"has no MTP block, no weight is named mtp\.0\.\*; load it"):
        load(folder, mtp=True)


@pytest.mark.parametrize("but", [1, 40])
def test_a_part_of_the_block_is_refused(original: WithMTP, tmp_path: Path, but: int) -> None:
    save_as_released(original, folder := tmp_path / "checkpoint")
    drop(folder, but=but)
    with pytest.raises(UnsupportedConfigError, match=r"the MTP block of the checkpoint lacks \d+ of its 31 weights"):
        load(folder, mtp=True)


@pytest.mark.parametrize("name", ["mtp.0.e_proj.weight", "mtp.0.hc_head_fn", "mtp.0.attn.wkv.weight"])
def test_a_weight_of_another_size_is_refused(original: WithMTP, tmp_path: Path, name: str) -> None:
    save_as_released(original, folder := tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.zeros(2, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedConfigError, match=r"1 weights have other sizes than .* example mtp\.0\..*\[2, 2\]"):
        load(folder, mtp=True)
    load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "has num_nextn_predict_layers 0; mtp=True needs exactly 1 MTP block"),
        ({"num_nextn_predict_layers": 2}, "has num_nextn_predict_layers 2; "),
        ({"compress_ratios": [0, 4, 128, 4, 4]}, r"has compression ratio 4 for its MTP block \(entry 4 of"),
    ],
)
def test_a_block_that_is_not_built_is_refused(
    original: WithMTP, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_as_released(original, folder := tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UnsupportedConfigError, match=message):
        load(folder, mtp=True)


# numbers


@torch.no_grad()
def streams_of(model: WithMTP, tokens: list[int]) -> Tensor:
    """Residual streams [1, S, n, hidden] of transformers' model."""
    seen: list[Tensor] = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(torch.tensor([tokens]))
    hook.remove()
    return seen[0]


@torch.no_grad()
def by_the_formula(model: WithMTP, ids: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [S, vocab] and streams of the block over a sequence: its formula, and transformers' own layer."""
    block, inner = model.mtp[0], model.model
    length, eps = len(ids), model.config.rms_norm_eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    embedded = norm(inner.embed_tokens.weight[ids], block.enorm.weight) @ block.e_proj.weight.T
    mixed = embedded[None, :, None] + norm(streams, block.hnorm.weight) @ block.h_proj.weight.T
    p = torch.arange(length)
    visible = (p <= p.unsqueeze(1)) & (p > p.unsqueeze(1) - model.config.sliding_window)
    mask = torch.zeros(1, 1, length, length).masked_fill(~visible, float("-inf"))
    turns = {kind: inner.rotary_emb(mixed, position_ids=p[None], layer_type=kind) for kind in ("main", "compress")}
    made = block(mixed, input_ids=ids[None], position_embeddings=turns, position_ids=p[None], attention_mask=mask)
    flat = made[0].flatten(1)
    flat = flat / (flat.square().mean(-1, keepdim=True) + eps).sqrt()
    share = torch.sigmoid(flat @ block.hc_head_fn.T * block.hc_head_scale + block.hc_head_base) + model.config.hc_eps
    one = (share.unsqueeze(-1) * made[0]).sum(1)
    return functional.linear(norm(one, block.kv_norm.weight), model.lm_head.weight), made


class Noting:
    """A drafter whose logits of live rows are kept: of first drafts by position, and of second ones call by call.

    A call for second drafts has one row, since there is one request.
    """

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.firsts: dict[int, Tensor] = {}
        self.seconds: list[tuple[int, int, Tensor]] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, step: Any, streams: Tensor) -> Any:
        logits, made = self.drafter(input_ids, positions, step, streams)
        if len(input_ids) == 1:
            self.seconds.append((int(positions[0]), int(input_ids[0]), logits[0].clone()))
        else:
            live = (step.token_to_req >= 0).nonzero().flatten().tolist()
            assert not self.firsts.keys() & {int(positions[row]) for row in live}  # each position once
            self.firsts.update({int(positions[row]): logits[row].clone() for row in live})
        return logits, made


@pytest.mark.parametrize("runner_type", RUNNERS)
def test_every_draft_is_what_the_formula_says(
    original: WithMTP, swapped: SwappedModelWithMTP, runner_type: type[ModelRunner]
) -> None:
    """In chunks, over rejections, for first drafts and for second ones, which follow guesses."""
    (prompt,) = make_prompts(150)
    drafter = Noting(swapped.drafter)
    options = {**LIMITS, "max_num_batched_tokens": 37, "drafter": drafter, "num_draft_tokens": 2}
    runner = runner_type(swapped, swapped.config, **options)
    tokens = prompt + runner.generate([prompt], 12)[0]
    streams = streams_of(original, tokens[:-1])
    logits, made = by_the_formula(original, torch.tensor(tokens[1:]), streams)
    counts = runner.draft_counts
    assert 0 < counts.accepted < counts.drafted
    assert sorted(drafter.firsts) == list(range(len(drafter.firsts)))
    for position, row in drafter.firsts.items():
        torch.testing.assert_close(row, logits[position], rtol=0, atol=1e-4)
    assert len(drafter.seconds) > 2
    for position, draft, row in drafter.seconds:  # the block's own streams, and its first draft
        assert draft == int(logits[position - 1].argmax())
        ids = torch.tensor([*tokens[1 : position + 1], draft])
        guess = torch.cat([streams[:, :position], made[:, position - 1 : position]], dim=1)
        torch.testing.assert_close(row, by_the_formula(original, ids, guess)[0][-1], rtol=0, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2])
def test_answers_are_those_of_transformers(original: WithMTP, swapped: SwappedModelWithMTP, count: int) -> None:
    prompts = make_prompts(3, 150, 1, 64, 129)
    expected = []
    for prompt in prompts:
        generated = original.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        expected.append(generated[0, len(prompt) :].tolist())
    runner = ModelRunnerV2(swapped, swapped.config, drafter=swapped.drafter, num_draft_tokens=count, **LIMITS)
    assert runner.generate(prompts, 12) == expected
    assert runner.draft_counts.accepted > 0


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")  # transformers' own
@pytest.mark.parametrize("runner_type", RUNNERS[::-1])
def test_compiled_each_as_one_graph_and_captured_together(
    runner_type: type[ModelRunner],
) -> None:
    swapped = swap_attention(random_with_mtp((4, 128)))
    buckets = (2, 9, 32)
    limits = {"max_num_reqs": 3, "max_num_batched_tokens": 32, "max_model_len": 200}
    prompts = make_prompts(40, 6, 20)
    expected = runner_type(swapped, swapped.config, **limits).generate(prompts, 8)
    options = {"runner": "mrv1" if runner_type is ModelRunnerV1 else "mrv2", "pool": MemoryPool(), "max_tokens": 32}
    model, drafter = (
        torch.compile(module, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=options)
        for module in (swapped, swapped.drafter)
    )
    runner = runner_type(
        model, swapped.config, attention=swapped, drafter=drafter, num_draft_tokens=2, buckets=buckets, **limits
    )
    with counters.expect(graphs_compiled=2, captures=6, uncaptured_calls=6):
        dsv4_compile.capture(runner.run_padding, lambda size: (size,), buckets, progress=False)
    with counters.expect(graphs_compiled=0, captures=0, recaptures=0, uncaptured_calls=0):
        assert runner.generate(prompts, 8) == expected


def test_the_experts_of_the_block_are_those_of_the_model(tmp_path: Path) -> None:
    random_with_mtp((0,)).save_pretrained(tmp_path / "checkpoint")
    model = load_original(tmp_path / "checkpoint", mtp=True, experts_implementation="eager")
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    assert [module.config._experts_implementation for module in experts] == ["eager", "eager"]
    model.set_experts_implementation("batched_mm")
    assert [module.config._experts_implementation for module in experts] == ["batched_mm", "batched_mm"]


def test_the_original_generates_without_the_block(original: WithMTP, tmp_path: Path) -> None:
    original.save_pretrained(tmp_path / "checkpoint")
    plain, more = load_original(tmp_path / "checkpoint"), load_original(tmp_path / "checkpoint", mtp=True)
    prompt = torch.tensor(make_prompts(9))
    answers = [model.generate(prompt, max_new_tokens=4, do_sample=False).tolist() for model in (plain, more)]
    assert answers[0] == answers[1]
