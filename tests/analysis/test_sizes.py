"""Sizes of calls: what they come to, and that calls which come again evaluate none."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from runtime_helpers import compile_host
from torch import Tensor, fx

from dsv4_compile.analysis import sizes as module
from dsv4_compile.analysis.sizes import Sizes, SizesOfCalls
from dsv4_compile.graph.traced import TensorMeta

N = sympy.Symbol("n", integer=True, positive=True)


def layer(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.ops.toy.fresh(torch.relu(x @ w) + 1)
    return x[1:]


@pytest.mark.parametrize("options", [{"engine": "off"}, {"capture_sizes": [1]}], ids=["off", "not listed"])
@pytest.mark.parametrize("piece_compiler", ["eager", "aot_eager"])
def test_uncaptured_calls_of_known_sizes_evaluate_none(
    options: dict[str, Any], piece_compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[object] = []
    of = Sizes.of_expr
    monkeypatch.setattr(Sizes, "of_expr", lambda self, expr: evaluated.append(expr) or of(self, expr))
    compiled = compile_host(layer, piece_compiler=piece_compiler, **options)
    w = torch.randn(4, 4)
    with torch.no_grad():
        for n in (8, 9):
            compiled(torch.randn(n, 4), w)
        first = len(evaluated)
        for n in (9, 8, 9):
            x = torch.randn(n, 4)
            assert torch.allclose(compiled(x, w), layer(x, w))
    assert len(evaluated) - first <= 3  # the token count, looked up where sizes are listed
    assert first > 3


def test_a_layout_is_made_once_and_memory_each_time() -> None:
    meta = TensorMeta((3, 2), (2, 1), 0, torch.float64, torch.device("cpu"), 0)
    sizes = Sizes({})
    assert sizes.meta_tensor(meta) is sizes.meta_tensor(meta)
    one, other = sizes.allocate(meta), sizes.allocate(meta)
    assert one.data_ptr() != other.data_ptr()
    assert (one.shape, one.stride(), one.dtype, one.device.type) == ((3, 2), (2, 1), torch.float64, "cpu")


def test_only_the_sizes_of_the_last_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 2)
    node = fx.Graph().placeholder("n")
    calls = SizesOfCalls({N: node})
    kept = {n: calls.of({node: n}) for n in (1, 2, 3)}
    assert calls.of({node: 3}) is kept[3]
    assert calls.of({node: 2}) is kept[2]
    assert calls.of({node: 1}) is not kept[1]
    assert calls.of({node: 5}).of_expr(2 * N + 1) == 11
