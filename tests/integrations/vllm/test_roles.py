"""Roles by the rule: an op of vLLM that takes the name of a layer reaches what belongs to the step."""

from __future__ import annotations

import pytest
import torch
from torch.library import Library

import dsv4_compile
from dsv4_compile.integrations.vllm.roles import context_readers, register_roles
from dsv4_compile.integrations.vllm.step_metadata import step_tensors
from dsv4_compile.ops.registry import snapshot

SCHEMAS = (
    "attend_text(Tensor q, Tensor(a!) out, str layer_name) -> ()",
    "attend_cache(Tensor q, str k_cache_prefix) -> Tensor",
    "norm(Tensor x, str name) -> Tensor",
    "moe_forward(Tensor x, str layer_name) -> Tensor",
)
LIBRARY = Library("vllm", "FRAGMENT")
for _schema in SCHEMAS:
    if not hasattr(torch.ops.vllm, _schema.partition("(")[0]):
        LIBRARY.define(_schema)


def roles(**given: bool) -> dict[str, tuple[str, bool]]:
    register_roles(data_parallel=False, **given) if not given else register_roles(**given)
    return {name: (op.role, op.reads_context) for name, op in snapshot().items() if name.startswith("vllm::")}


def test_the_rule_finds_what_names_a_layer() -> None:
    found = context_readers()
    assert {"vllm::attend_text", "vllm::attend_cache", "vllm::moe_forward"} <= set(found)
    assert "vllm::norm" not in found


def test_readers_split_and_experts_are_captured() -> None:
    found = roles()
    assert found["vllm::attend_text"] == found["vllm::attend_cache"] == ("split", True)
    assert found["vllm::moe_forward"] == ("capture", False)


def test_experts_read_the_step_where_other_ranks_have_batches_of_their_own() -> None:
    assert roles(data_parallel=True)["vllm::moe_forward"] == ("split", True)


def test_a_role_that_somebody_has_given_stays_and_is_proved_at_run_time() -> None:
    dsv4_compile.register_op("vllm::attend_cache", role="prepare", reads_context=True)
    dsv4_compile.register_op("vllm::attend_text", role="capture")
    found = roles()
    assert found["vllm::attend_cache"] == ("prepare", True)
    assert found["vllm::attend_text"] == ("capture", False)
    assert snapshot()["vllm::attend_cache"].context is step_tensors


@pytest.mark.parametrize("op", ["vllm::attend_text"])
def test_roles_may_be_given_again(op: str) -> None:
    assert roles()[op] == roles()[op]
