"""Graphs whose effects only a run on symbolic sizes can tell: composite ops run there as Dynamo ran them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_helpers import compile_host
from torch import Tensor
from torch.nn import functional

from dsv4_compile.graph.traced import FakeInputs, TracedGraph

MODULE = importlib.import_module("dsv4_compile.passes.infer_effects")


def twice(x: Tensor) -> Tensor:
    return x.expand(2, *x.shape)


COMPOSITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: twice(x) @ w,
    "linear": lambda x, w: functional.linear(twice(x), w),
    "tensordot": lambda x, w: torch.tensordot(twice(x), w, 1),
    "einsum": lambda x, w: torch.einsum("bij,jk->bik", twice(x), w),
    "kron": torch.kron,
    "group_norm": lambda x, w: functional.group_norm(twice(x).transpose(1, 2), 2),
    "attention": lambda x, w: functional.scaled_dot_product_attention(twice(x), twice(x), twice(x)),
    "cross_entropy": lambda x, w: functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "tensor_split": lambda x, w: torch.cat(x.tensor_split(3)),
    "unflatten": lambda x, w: x.flatten().unflatten(0, (-1, 4)),
    "interpolate": lambda x, w: functional.interpolate(x[None, None], scale_factor=2.0),
    "block_diag": lambda x, w: torch.block_diag(x, w),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, w]),
    "normalize": lambda x, w: functional.normalize(x),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_op_after_a_change_of_metadata(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    run = MODULE.run_on_fakes

    def watched(graph: TracedGraph, fake_inputs: FakeInputs) -> TracedGraph:
        runs.append(fake_inputs.concrete)
        return run(graph, fake_inputs)

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        turned = x.clone()
        turned.t_()  # what the trace keeps of the clone is the turned one
        return COMPOSITES[name](x, w), turned

    monkeypatch.setattr(MODULE, "run_on_fakes", watched)
    compiled: Any = compile_host(program)
    w = torch.randn(4, 4)
    with torch.no_grad():
        for n in (5, 5, 5, 7, 7):
            x = torch.randn(n, 4)
            torch.testing.assert_close(compiled(x, w), program(x, w))
    assert runs
    assert set(zip(runs[::2], runs[1::2], strict=True)) == {(True, False)}
