"""Layers of one kind are compiled once, and what a piece compiler of the user's own may and may not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from noting_compiler import NotingCompiler
from torch import Tensor, fx, nn
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile.errors import OptionError, PieceCompileError


class Layers(nn.Module):
    """`count` layers of one kind; `change` makes one of them nearly equal only."""

    def __init__(self, count: int, change: Callable[[int], dict[str, Any]] = lambda index: {}) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**change(index)) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, constant: int = 3, axis: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4, bias=bias)
        self.constant, self.axis = constant, axis

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x) * self.constant
        q = q - q.mean(self.axis, keepdim=True)
        out = torch.empty_like(q)
        torch.ops.toy.attn(q, out)
        return out.sin()


def compiled_graphs(model: nn.Module) -> int:
    compiler = NotingCompiler()
    options = {"split_ops": SPLIT, "piece_compiler": compiler}
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)
    x = torch.randn(8, 4)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    return len(compiler.graphs)


def test_layers_of_one_kind_are_compiled_once() -> None:
    # the first piece, those between two layers, the last
    assert compiled_graphs(Layers(2)) == compiled_graphs(Layers(9)) == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [{"constant": 4}, {"axis": 0}, {"bias": False}])
def test_nearly_equal_layers_are_not_shared(change: dict[str, Any]) -> None:
    # the fifth differs, and its piece begins with the end of the fourth
    assert compiled_graphs(Layers(9, lambda index: change if index == 4 else {})) == 4


def test_counters_tell_compiled_pieces_from_reused_ones() -> None:
    options = {"split_ops": SPLIT, "piece_compiler": NotingCompiler()}
    compiled = torch.compile(Layers(9), backend="dsv4_piecewise", dynamic=True, options=options)
    with torch.no_grad(), dsv4_compile.counters.expect(pieces_compiled=3, pieces_reused=7):
        compiled(torch.randn(8, 4))


RETURNS: list[Callable[[Sequence[Tensor]], Any]] = [tuple, list, lambda results: results[0]]


@pytest.mark.parametrize("returned", RETURNS)
def test_a_compiler_may_return_a_tuple_a_list_or_a_bare_tensor(returned: Callable[[Sequence[Tensor]], Any]) -> None:
    options = {"piece_compiler": NotingCompiler(returned)}
    compiled = torch.compile(lambda x: x * 2, backend="dsv4_piecewise", dynamic=True, options=options)
    x = torch.randn(8, 4)
    for _ in range(4):
        assert torch.equal(compiled(x), x * 2)


def merged(results: Sequence[Tensor]) -> list[Tensor]:
    """Equal results as one tensor."""
    kept: list[Tensor] = []
    for result in results:
        kept.append(next((other for other in kept if torch.equal(other, result)), result))
    return kept


def test_a_compiler_may_return_one_tensor_for_equal_results() -> None:
    """No op of its graph sees that; one after it writes one of the two."""

    def model(x: Tensor) -> Tensor:
        written, kept = x * 2, x * 2
        torch.ops.probe.store(x + 1, written)
        return written * 10 + kept

    compiled = torch.compile(
        model, backend="dsv4_piecewise", dynamic=True, options={"piece_compiler": NotingCompiler(merged)}
    )
    for _ in range(4):
        x = torch.randn(8, 4)
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("returned", [lambda results: None, lambda results: [], lambda results: ()])
def test_a_compiler_may_return_nothing_for_a_piece_that_only_writes(returned: Callable[..., Any]) -> None:
    options = {"piece_compiler": NotingCompiler(returned)}

    def write(x: Tensor, cache: Tensor) -> None:
        cache.add_(x)

    compiled = torch.compile(write, backend="dsv4_piecewise", dynamic=True, options=options)
    x, cache = torch.ones(8, 4), torch.zeros(8, 4)
    for calls in range(1, 5):
        assert compiled(x, cache) is None
        assert torch.equal(cache, calls * x)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda results: (*results, *results), "returned .Tensor, Tensor., the graph it was given returns 1 tensor"),
        (lambda results: (1.0,), "returned .float., the graph it was given returns 1 tensor"),
        (lambda results: results[0].double(), "returned torch.float64 .8, 4. for mul"),
        (lambda results: results[0][:4], "returned torch.float32 .4, 4. for mul"),
    ],
)
def test_a_compiler_that_returns_something_else_is_named(returned: Callable[..., Any], message: str) -> None:
    options = {"piece_compiler": NotingCompiler(returned)}
    compiled = torch.compile(lambda x: x * 2, backend="dsv4_piecewise", dynamic=True, options=options)
    with pytest.raises(PieceCompileError, match=f"what NotingCompiler made of piece_0.0 {message}"):
        compiled(torch.randn(8, 4))


def test_a_compiler_that_fails_is_named_with_the_piece_and_the_line() -> None:
    def broken(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        raise ZeroDivisionError("on purpose")

    compiled = torch.compile(lambda x: x * 2, backend="dsv4_piecewise", options={"piece_compiler": broken})
    message = r"broken failed to compile piece_0.0 \(from .*test_compile_once.py:\d+.*ZeroDivisionError: on purpose"
    with pytest.raises(PieceCompileError, match=message):
        compiled(torch.randn(8, 4))
    assert dsv4_compile.counters.graphs_compiled == 0


def test_a_compiler_has_to_return_a_callable() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="dsv4_piecewise", options={"piece_compiler": lambda gm, fakes: 7})
    with pytest.raises(PieceCompileError, match=r"returned 7 for piece_0\.0: it must return a callable"):
        compiled(torch.randn(8, 4))


def test_an_unknown_compiler_is_refused() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="dsv4_piecewise", options={"piece_compiler": "inductr"})
    with pytest.raises(OptionError, match="did you mean 'inductor'"):
        compiled(torch.randn(8, 4))


def test_what_a_compiler_does_to_its_graph_stays_there() -> None:
    """Inductor edits the graph it is given; the original is still what a copy of the piece is checked with."""

    def vandal(gm: fx.GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
        good = fx.GraphModule(gm, fx.Graph())
        good.graph.output(good.graph.graph_copy(gm.graph, {}))
        good.recompile()
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.args = (0,) * len(node.args)
        return good

    options = {"split_ops": SPLIT, "piece_compiler": vandal, "check": "full"}
    model = Layers(4)
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)
    x = torch.randn(8, 4)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
