"""A model that transformers has spread over processes: what is passed on, what is refused, and what it answers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_layers import LIMITS, make_prompts
from hf_models import random_hf_model, tiny_hf_config
from torch import nn

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import Dsv4Error, UnsupportedConfigError
from dsv4_compile.integrations.sharding import group_of, is_sharding_hook, sharding_arguments, whole
from dsv4_compile.integrations.transformers import load_original, swap_attention
from dsv4_compile.runners import ModelRunnerV2

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

if dist.is_available():
    from processes import free_port, gloo_group, in_processes, values_of
    from sharded import mesh, sharded
    from torch.distributed.tensor import Shard

PROMPTS = make_prompts(3, 150, 1, 20)


def test_nothing_is_asked_for_without_a_plan() -> None:
    assert sharding_arguments(None, None) == {}
    assert group_of(nn.Linear(2, 2)) is None


def test_a_plan_is_passed_on_in_the_argument_that_takes_it() -> None:
    for plan in ("auto", {"layers.*.mlp.experts": "moe_tp_experts"}):
        given = sharding_arguments(plan, None)
        (config,) = given.values()
        assert getattr(config, "tp_plan", config) == plan


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fsdp_size": 2}, "distributed_config has fsdp_size=2, which is not served: every rank runs all layers"),
        ({"pp_size": 4}, "distributed_config has pp_size=4, which is not served"),
        ({"dp_replicate_size": 2}, "distributed_config has dp_replicate_size=2, which is not served"),
        ({"ep_size": 2, "ep_implementation": "all_to_all"}, "ep_implementation='all_to_all', which is not served"),
    ],
)
def test_other_kinds_of_parallelism_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        sharding_arguments(None, config)
    assert sharding_arguments(None, {"tp_size": 2, "ep_size": 2}) == {
        "distributed_config": {"tp_size": 2, "ep_size": 2}
    }


def test_two_plans_are_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="give either tp_plan or distributed_config"):
        sharding_arguments("auto", {"tp_size": 2})


def test_weights_of_attention_are_whole() -> None:
    with gloo_group(0, 1, free_port()):
        on = mesh()
        weight = nn.Parameter(torch.ones(4, 2), requires_grad=False)
        assert whole(weight, "q") is weight
        replicated = whole(nn.Parameter(sharded(torch.ones(4, 2), on)), "q")
        assert type(replicated.data) is torch.Tensor
        message = r"^self_attn.q is sharded \(S\(0\)\), and our attention reads its weights whole: leave the attention"
        with pytest.raises(UnsupportedConfigError, match=message):
            whole(sharded(torch.ones(4, 2), on, Shard(0)), "self_attn.q")


def test_hooks_of_sharding_are_let_in_and_others_are_not() -> None:
    model = random_hf_model(tiny_hf_config((0,)))
    experts: Any = model.model.layers[0].mlp.experts
    experts.forward = experts.forward
    with pytest.raises(UnsupportedConfigError, match="experts has hooks around its forward; load without device_map"):
        swap_attention(model)
    experts._is_hooked = True
    assert is_sharding_hook(experts)
    swap_attention(model)
    projection: Any = model.model.layers[0].self_attn.q_b_proj
    projection.forward, projection._is_hooked = projection.forward, True
    with pytest.raises(UnsupportedConfigError, match="q_b_proj has hooks around its forward; leave attention out of"):
        swap_attention(model)


@torch.no_grad()
def answers(path: str, rank: int | None, **plan: Any) -> list[Any]:
    """What a compiled model answers, of which layers, with how many captures."""
    import os

    if rank is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    warnings.simplefilter("ignore")  # as torchrun would have it: transformers and torch warn of their own ways
    original: Any = load_original(path, dtype=torch.float32, **plan).eval()
    original.set_experts_implementation("batched_mm")
    model = swap_attention(original)
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options={"runner": "mrv2"})
    runner = ModelRunnerV2(compiled, model.config, attention=model, buckets=(4, 16, 64), **LIMITS)

    def inputs_for(size: int) -> tuple[Any, ...]:
        inputs = runner.padding_inputs(size)
        return inputs.input_ids, inputs.positions, inputs.step

    dsv4_compile.capture(compiled, inputs_for, (4, 16, 64), group=model.process_group)
    tokens = runner.generate(PROMPTS, max_new_tokens=5)
    experts: Any = original.model.layers[0].mlp.experts
    return [tokens, counters.captures, tuple(experts.gate_up_proj.to_local().shape) if rank is not None else None]


def serve_sharded(rank: int, path: str, plan: dict[str, Any]) -> Any:
    try:
        return answers(path, rank, **plan)
    except Dsv4Error as error:
        return f"{type(error).__name__}: {error}"


BAD = {"distributed_config": {"tp_size": 4}}, {"tp_plan": {"model.layers.*.self_attn.q_b_proj": "colwise"}}


def serve_each_way(rank: int, path: str) -> list[Any]:
    whole_experts = {"distributed_config": {"tp_size": 2, "ep_size": 2}}
    return [serve_sharded(rank, path, plan) for plan in (*BAD, whole_experts)]


@pytest.mark.exhaustive
def test_two_processes_answer_as_one_does(tmp_path: Path) -> None:
    """With whole experts on each; tests/docs/test_demo.py has them in slices."""
    pytest.importorskip("accelerate")
    config = tiny_hf_config((0, 4), hc_sinkhorn_iters=2)
    random_hf_model(config).save_pretrained(tmp_path)
    whole_answers, _, _ = answers(str(tmp_path), None)
    for refused, attention, served in values_of(in_processes(serve_each_way, str(tmp_path))):
        assert "transformers cannot shard it so: The parallel mesh requires 4 processes, but world_size is 2" in refused
        assert "q_b_proj has hooks around its forward; leave attention out of the plan" in attention
        assert served == [whole_answers, 3, (4, 48, 48)]
