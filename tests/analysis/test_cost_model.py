"""What decides over streams from outside: the options, the device, and the weights of nodes with their hints."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from stages import stages_of
from torch import Tensor
from toy_ops import SPLIT

from dsv4_compile import config, register_op
from dsv4_compile.analysis.cost_model import BYTES, KERNEL, SMALL_KERNEL, cost_of
from dsv4_compile.config import Config
from dsv4_compile.errors import ArgumentError, OptionError
from dsv4_compile.graph.traced import TracedGraph
from dsv4_compile.ops.registry import snapshot

toy = torch.ops.toy


@pytest.mark.parametrize("hip", [None, "6.4"])
@pytest.mark.parametrize("device", ["cuda", "cpu", "xpu"])
def test_auto_is_none_where_no_device_has_measured_a_gain(
    hip: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert Config().resolved_aux_streams(device) == 0
    assert Config.from_options({"aux_streams": "auto"}).resolved_aux_streams(device) == 0


def test_auto_is_what_a_device_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MEASURED_STREAMS", {"cuda": 2})
    assert [Config().resolved_aux_streams(device) for device in ("cuda", "cpu")] == [2, 0]


@pytest.mark.parametrize("hip", [None, "6.4"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_number_counts_everywhere(hip: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert Config.from_options({"aux_streams": 2}).resolved_aux_streams(device) == 2


@pytest.mark.parametrize(
    ("value", "hint"),
    [(-1, "."), ("many", "."), ("Auto", ": did you mean 'auto'?"), (True, "."), ("3", "."), (1.5, ".")],
)
def test_a_wrong_number_of_streams_is_refused(value: object, hint: str) -> None:
    message = f"option aux_streams={value!r} is not valid{hint} Valid: auto or an integer of at least 0"
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Config.from_options({"aux_streams": value})


def test_a_wrong_bound_of_streams_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^option aux_stream_max_tokens=1\.5 must be an integer of at least 0$"):
        Config.from_options({"aux_stream_max_tokens": 1.5})


def costs(fn: Any, *args: Tensor, **options: Any) -> dict[str, int]:
    _, graph, _ = stages_of(fn, *args, **{"split_ops": SPLIT, **options})
    return costs_of(graph.traced)


def costs_of(traced: TracedGraph) -> dict[str, int]:
    return {node.name: cost_of(traced, node) for node in traced.compute_nodes()}


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_a_small_product_is_a_kernel_and_a_small_sum_is_less() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        total = product + 1
        return toy.fresh(total)

    assert costs(fn, torch.zeros(5, 4), torch.zeros(4, 4)) == {
        "product": KERNEL,
        "total": SMALL_KERNEL,
        "fresh": KERNEL,
    }


@pytest.mark.parametrize("product", [torch.matmul, torch.mm, lambda x, w: torch.nn.functional.linear(x, w.t())])
def test_a_product_of_few_rows_takes_what_its_bytes_take(product: Any) -> None:
    expected = KERNEL + 4 * (8 * 4096 + 4096 * 6000 + 8 * 6000) // BYTES  # fp32

    def fn(x: Tensor, w: Tensor) -> Tensor:
        result = product(x, w)
        return toy.fresh(result)

    assert costs(fn, meta(8, 4096), meta(4096, 6000))["result"] == expected > KERNEL


def test_batched_products_and_biases_count_by_their_bytes() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        batched = torch.bmm(x, w)
        biased = torch.baddbmm(b, x, w)
        return toy.fresh(batched + biased)

    batch, m, k, n = 16, 64, 512, 2048
    found = costs(fn, meta(batch, m, k), meta(batch, k, n), meta(batch, m, n))
    operands = 4 * batch * (m * k + k * n)
    assert found["batched"] == KERNEL + (operands + 4 * batch * m * n) // BYTES
    assert found["biased"] == KERNEL + (operands + 2 * 4 * batch * m * n) // BYTES


def test_other_ops_take_what_results_and_activations_take() -> None:
    """A look-up reads a few rows of a weight, so the weight does not count."""
    table = torch.nn.Parameter(meta(1_000_000, 64))

    def fn(ids: Tensor) -> Tensor:
        rows = torch.nn.functional.embedding(ids, table)
        double = rows * 2
        return toy.fresh(double)

    found = costs(fn, torch.zeros(50_000, dtype=torch.long, device="meta"))
    assert found["rows"] == SMALL_KERNEL + (4 * 50_000 * 64 + 8 * 50_000) // BYTES
    assert found["double"] == SMALL_KERNEL + 2 * 4 * 50_000 * 64 // BYTES


@pytest.mark.parametrize(("hint", "expected"), [(3, 3 * KERNEL), (0.5, KERNEL // 2), (0, 1)])
def test_a_hint_scales_the_cost(hint: float, expected: int) -> None:
    register_op("toy::fresh", role="split", cost=hint)
    assert costs(lambda x: toy.fresh(x) + 1, torch.zeros(5, 4))["fresh"] == expected


def test_a_hint_decides_over_a_stream() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        side = toy.over(x)
        product = x @ w
        return toy.fresh(side + product)

    args = torch.zeros(5, 4), torch.zeros(4, 4)
    _, graph, _ = stages_of(fn, *args, split_ops=SPLIT, aux_streams=3)
    assert len(graph.streams) == 1
    register_op("toy::over", role="capture", cost=0)
    _, graph, _ = stages_of(fn, *args, split_ops=SPLIT, aux_streams=3)
    assert graph.streams == {}


@pytest.mark.parametrize("cost", [-1, float("inf"), float("nan"), "heavy", True, None])
def test_a_hint_that_is_no_cost_is_refused(cost: object) -> None:
    expected = f"^register_op\\('toy::over'\\): cost is {cost!r}; it must be a finite number of at least 0$"
    with pytest.raises(ArgumentError, match=expected):
        register_op("toy::over", role="capture", cost=cost)
    assert "toy::over" not in snapshot()
