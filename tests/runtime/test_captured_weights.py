"""Weights of captured models: which instance has them, where they are, and what follows when they change."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from case_helpers import Pair, rows
from runtime_helpers import HOST, call_often, compile_host, entries
from torch import Tensor, fx, nn
from weighted_model import Model, toy

from dsv4_compile import counters
from dsv4_compile.backend import dsv4_piecewise


def test_instances_of_one_class_share_a_graph_and_nothing_else() -> None:
    models = [Model(), Model(), Model()]
    pairs = [Pair(model, HOST) for model in models]
    with counters.expect(graphs_compiled=1, captures=2 * 3, recaptures=0, uncaptured_calls=2):
        for n in (5, 6) * 4:
            for pair in pairs:
                pair(rows(n))
    assert len(entries()) == 2 * 3  # all in one callable
    assert len({tuple(model.seen.tolist()) for model in models}) == 3


def test_instances_are_told_apart_without_an_address_check() -> None:
    pairs = [Pair(Model(), HOST, check="off") for _ in range(3)]
    for n in (5, 6) * 3:
        for pair in pairs:
            pair(rows(n))


def replace_data(model: Model) -> None:
    model.w.data = torch.randn(4, 4)


def assign_state(model: Model) -> None:
    model.load_state_dict({"w": torch.randn(4, 4), "seen": torch.ones(4)}, assign=True)


def set_parameter(model: Model) -> None:
    model.w = nn.Parameter(torch.randn(4, 4), requires_grad=False)


def set_buffer(model: Model) -> None:
    model.seen = torch.ones(4)


@pytest.mark.parametrize("move", [replace_data, assign_state, set_parameter, set_buffer])
def test_replaced_weight_is_noticed_and_captured_again(move: Callable[[Model], None]) -> None:
    model = Model()
    pair = Pair(model, HOST)
    for _ in range(3):
        pair(rows(5))
    for _ in range(3):
        move(model)
        with counters.expect(graphs_compiled=0, captures=1, recaptures=1, uncaptured_calls=0, replays=3):
            for _ in range(3):
                pair(rows(5))
    assert len(entries()) == 1  # programs of old weights are gone


def test_a_model_in_the_place_of_one_that_is_gone_counts_as_captured_again() -> None:
    """As one whose parameters were all replaced does: nothing in a call tells the two apart."""

    def run(model: Model, x: Tensor) -> Tensor:
        return model(x)

    compiled = compile_host(run)
    for again in (0, 1, 1):
        model = Model()
        with counters.expect(captures=1, recaptures=again):
            call_often(compiled, model, rows(5))
        del model
        gc.collect()


def test_every_bucket_that_a_moved_weight_invalidates_counts_as_recaptured() -> None:
    model = Model()
    pair = Pair(model, HOST)
    for n in (5, 6, 7) * 2:
        pair(rows(n))
    model.w.data = torch.randn(4, 4)
    with counters.expect(captures=3, recaptures=3, uncaptured_calls=0):
        for n in (5, 6, 7) * 2:
            pair(rows(n))


def test_weights_loaded_in_place_need_no_capture() -> None:
    model = Model()
    pair = Pair(model, HOST)
    for _ in range(3):
        pair(rows(5))
    with counters.expect(captures=0, recaptures=0, replays=4):
        model.load_state_dict({"w": torch.randn(4, 4), "seen": torch.ones(4)})
        pair(rows(5))
        model.w.data.mul_(-1)
        pair(rows(5))
        nn.init.ones_(model.w)
        pair(rows(5))
        model.seen.zero_()
        pair(rows(5))


def test_model_moved_to_another_dtype_and_back() -> None:
    model = Model()
    pair = Pair(model, HOST)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        for _ in range(3):
            pair(rows(5).to(dtype))


def test_weight_transposed_in_place_keeps_its_address() -> None:
    model = Model()
    pair = Pair(model, HOST)
    for _ in range(4):
        for _ in range(3):
            pair(rows(5))
        model.w.data = model.w.data.t()


def test_strides_of_weights_are_looked_at_where_dynamo_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of torch 2.11: it compiles nothing anew, so the callable sees the other strides itself."""
    graphs: list[Callable[..., Any]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(dsv4_piecewise(gm, example_inputs, options={"piece_compiler": "aot_eager"}))
        return graphs[-1]

    monkeypatch.setattr("dsv4_compile.runtime.program.keys.GUARDS_STRIDES", False)
    monkeypatch.setattr("dsv4_compile.runtime.traced_call.GUARDS_STRIDES", False)
    linear, x = nn.Linear(4, 4, bias=False), torch.randn(5, 4)
    with torch.no_grad():
        torch.compile(linear, backend=backend, fullgraph=True, dynamic=False)(x)
        (graph,) = graphs
        for weight in (linear.weight, nn.Parameter(linear.weight.data.t())) * 3:
            for _ in range(3):  # one memory, read in two ways
                torch.testing.assert_close(graph(weight, x)[0], nn.functional.linear(x, weight))


def test_weights_swapped_between_two_models() -> None:
    first, second = Model(), Model()
    pairs = [Pair(first, HOST), Pair(second, HOST)]
    for _ in range(3):
        for pair in pairs:
            pair(rows(5))
        first.w, second.w = second.w, first.w
        for pair in pairs:
            pair(rows(5))


def test_tied_weights_and_a_buffer_that_is_a_slice_of_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 4), requires_grad=False)
            self.b = self.a
            self.register_buffer("tail", self.a.data[2:])

        def forward(self, x: Tensor) -> Tensor:
            return toy.fresh(x @ self.a) @ self.b + self.tail.sum()

    model = Tied()
    compiled = compile_host(model)
    for weight in (model.a, nn.Parameter(torch.randn(4, 4), requires_grad=False)):
        model.b = weight
        for _ in range(4):
            x = rows(5)
            with torch.no_grad():
                assert torch.equal(compiled(x), model(x))
            model.a.mul_(-0.5)
