"""Programs go with the parameters and module buffers they were captured with, however a function reaches those."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_helpers import call_often, compile_host, entries
from stages import stages_of
from torch import Tensor, nn

from dsv4_compile import counters

toy = torch.ops.toy


class Scaled(nn.Module):
    """A parameter, a buffer and a plain tensor that the module refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("b", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return toy.fresh(x * self.w) + self.b + self.plain


class Buffered(nn.Module):
    """A buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return toy.fresh(x * self.w)


class Node:
    """A parameter in an object that is no module."""

    def __init__(self) -> None:
        self.w = nn.Parameter(torch.ones(4))


def in_a_dict(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return toy.fresh(x * weights["w"])


def in_a_list(weights: list[Tensor], x: Tensor) -> Tensor:
    return toy.fresh(x * weights[0])


def in_a_node(node: Node, x: Tensor) -> Tensor:
    return toy.fresh(x * node.w)


def by_itself(w: Tensor, x: Tensor) -> Tensor:
    return toy.fresh(x * w)


def in_a_module(module: Buffered, x: Tensor) -> Tensor:
    return module(x)


def a_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


PLACES = [
    (in_a_dict, lambda: {"w": a_parameter()}),
    (in_a_list, lambda: [a_parameter()]),
    (in_a_node, Node),
    (by_itself, a_parameter),
    (in_a_module, Buffered),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("function", "make"), PLACES)
def test_programs_go_with_the_weights_wherever_these_are_kept(
    function: Callable[..., Any], make: Callable[[], Any]
) -> None:
    run, weights = compile_host(function), make()
    call_often(run, weights, torch.ones(3, 4))
    assert len(entries()) == 1
    del weights
    gc.collect()
    assert entries() == []


@pytest.mark.parametrize("check", ["addresses", "off"])
def test_two_sets_of_parameters_in_a_list_are_told_apart(check: str) -> None:
    run = compile_host(in_a_list, check=check)
    x = torch.arange(4.0)
    first, second = ([nn.Parameter(torch.full((4,), value))] for value in (2.0, 3.0))
    with counters.expect(graphs_compiled=1, captures=2), torch.no_grad():
        for weights in (first, second):
            for _ in range(3):
                assert torch.equal(run(weights, x), in_a_list(weights, x))
    assert len(entries()) == 2


class Kept(nn.Module):
    """Has plain tensors, which are no buffers, in an attribute and in a list."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = torch.full((4,), value)
        self.caches = [torch.zeros(8, 4)]

    def forward(self, x: Tensor) -> Tensor:
        self.caches[0][: len(x)].copy_(x)
        return torch.ops.toy.fresh(x * self.scale)


@pytest.mark.parametrize("check", ["addresses", "off"])
@pytest.mark.parametrize("way", ["replaced", "another instance"])
def test_plain_tensors_of_a_module_are_told_apart(check: str, way: str) -> None:
    """Dynamo takes them for static, but nobody promised that they stay, whatever `check` says."""
    model = Kept(2.0)
    run, x = compile_host(model, check=check), torch.ones(5, 4)
    call_often(run, x)
    before = model.caches[0]
    if way == "replaced":
        model.scale, model.caches[0] = torch.full((4,), 3.0), torch.zeros(8, 4)
        other = model
    else:
        other = Kept(3.0)
        run = compile_host(other, check=check)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(2 * x), torch.ops.toy.fresh(6 * x))
    assert torch.equal(other.caches[0][:5], 2 * x)
    assert torch.equal(before[:5], x)


def test_a_program_outlives_a_plain_tensor_of_a_call() -> None:
    """The user may bring another one in each call; the program reads it through a slot."""
    run, x = compile_host(in_a_dict), torch.ones(3, 4)
    call_often(run, {"w": torch.ones(4)}, x)
    with counters.expect(captures=0, replays=3), torch.no_grad():
        for value in (2.0, 3.0, 4.0):
            weights = {"w": torch.full((4,), value)}
            assert torch.equal(run(weights, x), in_a_dict(weights, x))


def test_which_inputs_are_owned() -> None:
    def function(module: Scaled, more: dict[str, Tensor], w: Tensor, x: Tensor) -> Tensor:
        return module(x) + more["w"] + more["b"] + more["named._buffers['b']"] + w

    lent = {"w": a_parameter(), "b": Scaled().b, "named._buffers['b']": torch.ones(4)}
    _, graph, _ = stages_of(function, Scaled(), lent, a_parameter(), torch.ones(3, 4), split_ops=["toy::fresh"])
    assert [i.name for i in graph.traced.inputs if i.owned] == ["module.w", "module.b", "more.w", "w"]
