"""Passes, rules and checks are taken away, and the property test's own oracle must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import program_checks
import pytest
import torch
from mutated_passes import DEPENDENCES, PASSES, forget, in_context, prepared, run
from program_oracle import snapshot
from torch import Tensor

from dsv4_compile import passes
from dsv4_compile.analysis import effects
from dsv4_compile.graph import mode_scopes, op_properties, unit_key
from dsv4_compile.graph.partitioned import PartitionedGraph

toy = torch.ops.toy


@pytest.mark.parametrize("kind", ["reads", "writes", "barriers"])  # programs without draws are what the oracle judges
def test_an_illegal_move_that_is_not_checked_fails_the_property_test(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    program, changes = DEPENDENCES[kind]
    run(program)
    forget(monkeypatch, changes)
    monkeypatch.setattr(PASSES["move_nodes"], "check_same_meaning", lambda *_: None)
    with pytest.raises(AssertionError, match=r"\w+ passed \w+"):
        run(program)


@pytest.mark.parametrize("program", [prepared, in_context])
def test_hazards_that_are_not_checked_fail_the_property_test(
    monkeypatch: pytest.MonkeyPatch, program: Callable[..., Any]
) -> None:
    monkeypatch.setattr(program_checks, "check_hazards", lambda graph, runner: graph)
    with pytest.raises(AssertionError, match="a hazard is missed or made up"):
        run(program)


# What the property test must see of each pass and rule: how to break it, a program, and the complaint.
def nearly_equal_pieces(x: Tensor, **rest: Any) -> Tensor:
    return toy.fresh(x * 2) + toy.fresh(x * 3)


def result_of_a_mutation(x: Tensor, y: Tensor, **rest: Any) -> Tensor:
    h = x * 2
    z = h.add_(1)
    toy.tick(h)
    return z * y


def masked(x: Tensor, **rest: Any) -> Tensor:
    x[x > 0] = 1.0
    return toy.fresh(x)


def under_autocast(x: Tensor, w: Tensor, **rest: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = x @ w
        toy.tick(h)
        return h @ w


def zeroed(x: Tensor, **rest: Any) -> Tensor:
    out = torch.zeros_like(x)
    toy.attn(x[:, :2], out[:, 2:])
    return out + 1


def prepare_late(x: Tensor, y: Tensor, cache: Tensor, step: Tensor, **rest: Any) -> Tensor:
    a = toy.fresh(x) * 2
    toy.kv_write(a, step, cache)
    return toy.fresh(a * 3)


def unchanged(graph: PartitionedGraph) -> PartitionedGraph:
    return graph


RULES: dict[str, tuple[Any, str, Any, Callable[..., Any], str]] = {
    "a piece is known by its constants": (
        unit_key,
        "repr",
        lambda args: "",
        nearly_equal_pieces,
        "a plan computes something else",
    ),
    "a result that is an argument does not cross": (
        passes,
        "rebase_results",
        unchanged,
        result_of_a_mutation,
        "a storage crosses twice",
    ),
    "what a graph cannot hold is eager": (
        effects,
        "cudagraph_unsafe_reason",
        lambda *_: None,
        masked,
        r"\['setitem'\] is eager and should not be, or the reverse",
    ),
    "modes stay with their nodes": (
        mode_scopes,
        "scopes_of",
        lambda node: (),
        under_autocast,
        "some op runs twice, or not at all",
    ),
    "only allocations are free": (
        op_properties,
        "ALLOCATIONS",
        op_properties.ALLOCATIONS | {"zeros_like"},
        zeroed,
        "a node is lost or doubled",
    ),
    "wide starts at preparation": (
        PASSES["choose_regions"],
        "is_preparation",
        lambda *_: False,
        prepare_late,
        "a hazard is missed or made up",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_dropped_fails_the_property_test(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    owner, name, substitute, program, message = RULES[rule]
    run(program)
    monkeypatch.setattr(owner, name, substitute, raising=name != "repr")  # a builtin, shadowed in the module
    with pytest.raises(AssertionError, match=message):
        run(program)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: [x[1:].clone(), x[:1]],
        lambda x: [x[1:], x[:1].clone()],
        lambda x: [x[1:], x[1:2]],
        lambda x: [x[1:], x[:1].t()],
        lambda x: (x[1:], x[:1]),
        lambda x: [x[1:], x.mul_(2)[:1]],
    ],
    ids=["copied", "other copied", "other view", "other strides", "other container", "other data"],
)
def test_the_snapshot_of_a_call_shows_all_that_a_caller_can_see(other: Callable[[Tensor], Any]) -> None:
    first, second, third = (torch.arange(8.0).view(4, 2) for _ in range(3))
    expected = snapshot([first], [first[1:], first[:1]])
    assert snapshot([second], [second[1:], second[:1]]) == expected
    assert snapshot([third], other(third)) != expected
