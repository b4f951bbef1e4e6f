"""What decides over lanes from outside: the options, the device, and the weights of nodes with their hints."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from stages import drafts_of
from torch import Tensor
from toy_ops import SPLIT

from dsv4_compile import register_op
from dsv4_compile.config import Config
from dsv4_compile.draft import Draft
from dsv4_compile.errors import OptionError
from dsv4_compile.lane_weights import BYTES, KERNEL, MULTIPLY_ADDS, SMALL_KERNEL, weight_of
from dsv4_compile.ops.registry import snapshot

toy = torch.ops.toy


@pytest.mark.parametrize(("hip", "device", "lanes"), [(None, "cuda", 3), ("6.4", "cuda", 0), (None, "cpu", 0)])
def test_auto_is_three_on_cuda_and_none_elsewhere(
    hip: str | None, device: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch for ROCm calls its devices "cuda" too."""
    monkeypatch.setattr(torch.version, "hip", hip)
    assert Config().resolved_aux_streams(device) == lanes


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
    message = f"option aux_streams={value!r} is not valid{hint} Valid: auto or a whole number of at least 0"
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Config.from_options({"aux_streams": value})


def test_a_wrong_bound_of_streams_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^option aux_stream_max_tokens=1\.5 must be a whole number of at least 0$"):
        Config.from_options({"aux_stream_max_tokens": 1.5})


def weights(fn: Any, *args: Tensor, **options: Any) -> dict[str, int]:
    _, draft, _ = drafts_of(fn, *args, **{"split_ops": SPLIT, **options})
    return weights_of(draft)


def weights_of(draft: Draft) -> dict[str, int]:
    return {node.name: weight_of(draft, node) for node in draft.working_nodes()}


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def test_a_small_product_is_a_kernel_and_a_small_sum_is_less() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        total = product + 1
        return toy.fresh(total)

    assert weights(fn, torch.zeros(5, 4), torch.zeros(4, 4)) == {
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

    assert weights(fn, meta(8, 4096), meta(4096, 6000))["result"] == expected > KERNEL


def test_a_product_of_many_rows_takes_what_its_multiply_adds_take() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        result = torch.addmm(b, x, w)
        return toy.fresh(result)

    size = (4096, 2048, 1024)  # m, k, n
    found = weights(fn, meta(size[0], size[1]), meta(size[1], size[2]), meta(size[2]))["result"]
    assert found == KERNEL + size[0] * size[1] * size[2] // MULTIPLY_ADDS


def test_other_ops_take_what_results_and_activations_take() -> None:
    """A look-up reads a few rows of a weight, so the weight does not count."""
    table = torch.nn.Parameter(meta(1_000_000, 64))

    def fn(ids: Tensor) -> Tensor:
        rows = torch.nn.functional.embedding(ids, table)
        double = rows * 2
        return toy.fresh(double)

    found = weights(fn, torch.zeros(50_000, dtype=torch.long, device="meta"))
    assert found["rows"] == SMALL_KERNEL + (4 * 50_000 * 64 + 8 * 50_000) // BYTES
    assert found["double"] == SMALL_KERNEL + 2 * 4 * 50_000 * 64 // BYTES


@pytest.mark.parametrize(("hint", "expected"), [(3, 3 * KERNEL), (0.5, KERNEL // 2), (0, 1)])
def test_a_hint_scales_the_weight(hint: float, expected: int) -> None:
    register_op("toy::fresh", role="split", weight=hint)
    assert weights(lambda x: toy.fresh(x) + 1, torch.zeros(5, 4))["fresh"] == expected


def test_a_hint_decides_over_a_lane() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        side = toy.over(x)
        product = x @ w
        return toy.fresh(side + product)

    args = torch.zeros(5, 4), torch.zeros(4, 4)
    _, draft, _ = drafts_of(fn, *args, split_ops=SPLIT, aux_streams=3)
    assert len(draft.lanes) == 1
    register_op("toy::over", role="capture", weight=0)
    _, draft, _ = drafts_of(fn, *args, split_ops=SPLIT, aux_streams=3)
    assert draft.lanes == {}


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan"), "heavy", True, None])
def test_a_hint_that_is_no_weight_is_refused(weight: object) -> None:
    expected = f"^register_op\\('toy::over'\\): weight is {weight!r}; it must be a finite number of at least 0$"
    with pytest.raises(OptionError, match=expected):
        register_op("toy::over", role="capture", weight=weight)
    assert "toy::over" not in snapshot()
