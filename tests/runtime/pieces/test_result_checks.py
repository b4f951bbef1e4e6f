"""Results of one op that share memory, where its fake gives each memory of its own."""

from __future__ import annotations

import pytest
import torch
from eager_twin import check_calls
from torch import Tensor
from torch.library import Library

from dsv4_compile.errors import AliasingOpError

LIBRARY = Library("result_checks", "FRAGMENT")
ops = torch.ops.result_checks


def _define(name: str, returns: str, function, fake) -> None:
    LIBRARY.define(f"{name}(Tensor x) -> {returns}")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"result_checks::{name}", fake, lib=LIBRARY)


def _windows(x: Tensor) -> list[Tensor]:
    memory = torch.cat([x, x * 2])
    return [memory[: len(x)], memory[1 : len(x) + 1]]


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


def _columns(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = torch.cat([x, x * 2], dim=1).chunk(2, dim=1)
    return first, second


def _apart(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


_define("windows", "Tensor[]", _windows, lambda x: list(_apart(x)))
_define("twice", "(Tensor, Tensor)", _twice, _apart)
_define(
    "columns",
    "(Tensor, Tensor)",
    _columns,
    lambda x: tuple(x.new_empty_strided(x.size(), (2 * x.shape[1], 1)) for _ in range(2)),
)


def program(name: str):
    def run(x: Tensor) -> Tensor:
        first, second = getattr(ops, name)(x + 1)
        first.add_(5)
        return second * 2 - first

    return run


@pytest.mark.parametrize("split_ops", [(), ("result_checks::windows", "result_checks::twice")], ids=["piece", "region"])
@pytest.mark.parametrize("name", ["windows", "twice"])
def test_results_with_elements_in_one_place_are_refused(name: str, split_ops: tuple[str, ...]) -> None:
    said = rf"results of op result_checks::{name}\.default share memory, but its fake promises .*\.py:\d+"
    with pytest.raises(AliasingOpError, match=said):
        check_calls(program(name), [(torch.ones(4, 3),)] * 2, split_ops=split_ops)


@pytest.mark.parametrize("split_ops", [(), ("result_checks::columns",)], ids=["piece", "region"])
def test_results_side_by_side_in_one_buffer_are_not(split_ops: tuple[str, ...]) -> None:
    check_calls(program("columns"), [(torch.randn(n, 3),) for n in (4, 4, 4, 5, 4)], split_ops=split_ops)
