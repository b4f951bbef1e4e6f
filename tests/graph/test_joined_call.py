"""Ops whose results are parts of one buffer that the graph has no name for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from case_helpers import rows
from seen_alike import COMPILED, HOST, MINIMAL, OFF, assert_alike
from torch import Tensor
from torch.library import Library
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile.errors import LayoutMismatchError
from dsv4_compile.graph.joined_call import JoinedCall

fresh = torch.ops.toy.fresh
ops = torch.ops.parts
LIBRARY = Library("parts", "DEF")


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"parts::{name}", fake or kernel, lib=LIBRARY)


def _buffer(x: Tensor) -> Tensor:
    return torch.cat([x, x * 2, x * 3], -1)


def _windows(x: Tensor) -> list[Tensor]:
    rows = _buffer(x).view(-1)
    return [rows[: x.numel() + 2], rows[x.numel() - 2 : 2 * x.numel()], x + 1]


def _two_buffers(x: Tensor) -> tuple[Tensor, ...]:
    (a, b, c), (d, e) = _buffer(x).chunk(3, -1), (x.double() + 1).t().chunk(2)
    return a, d, b, x * 5, e, c


_define("thirds(Tensor x) -> (Tensor, Tensor, Tensor)", lambda x: _buffer(x).chunk(3, -1))
_define("list_of_thirds(Tensor x) -> Tensor[]", lambda x: list(_buffer(x).chunk(3, -1)))
_define("windows(Tensor x) -> Tensor[]", _windows)
_define("two_buffers(Tensor x) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _two_buffers)
_define("apart(Tensor x) -> Tensor[]", lambda x: [x * 1, x * 2, x * 3], lambda x: list(_buffer(x).chunk(3, -1)))
_define("part_and_whole(Tensor x) -> Tensor[]", lambda x: [(whole := _buffer(x))[1:], whole, whole[:, 2:]])


@torch.compiler.allow_in_graph
def foreign_thirds(x: Tensor) -> tuple[Tensor, ...]:
    return _buffer(x).chunk(3, -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
    found = fresh(k) + v
    v.mul_(2)
    return found, q @ k.t(), fresh(v).sum() + q, k, v


def captured_thirds(x: Tensor) -> Any:
    return attend(*ops.thirds(x + 1))


def eager_thirds(x: Tensor) -> Any:
    return attend(*ops.list_of_thirds(x + 1)), x


def function_outside_of_torch(x: Tensor) -> Any:
    return attend(*foreign_thirds(x + 1))


def overlapping_parts(x: Tensor) -> Any:
    first, second, other = ops.windows(x * 2)
    first.add_(10)
    kept = fresh(second)
    second[1:].mul_(3)
    return kept, first, second, fresh(first), other


def several_buffers(x: Tensor) -> Any:
    a, d, b, _, e, c = ops.two_buffers(x * 2)
    b.add_(a)
    e.mul_(2)
    return a, d, fresh(b), e, c, fresh(d.float()), x


def some_parts_only(x: Tensor) -> Any:
    parts = ops.thirds(x)
    return parts[2] + 1, fresh(parts[0])


def op_of_torch(x: Tensor) -> Any:
    row, column = torch.unravel_index(x.argsort(0).view(-1), (4, 8))
    column.add_(1)
    return row, column, fresh(row.float()) + column


def whole_among_the_parts(x: Tensor) -> Any:
    rest, whole, right = ops.part_and_whole(x)
    whole.mul_(2)
    return fresh(rest), whole, right, rest + 1


FUNCTIONS = (
    captured_thirds,
    eager_thirds,
    function_outside_of_torch,
    overlapping_parts,
    several_buffers,
    some_parts_only,
    op_of_torch,
    whole_among_the_parts,
)
SPLIT_OPS = (*SPLIT, "parts::list_of_thirds")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("settings", [HOST, OFF, MINIMAL, COMPILED], ids=["host", "off", "minimal", "compiled"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_parts_of_one_buffer(function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    assert_alike(function, lambda call: (torch.randn(8, 4),), split_ops=SPLIT_OPS, **settings)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [captured_thirds, overlapping_parts, op_of_torch])
def test_of_many_sizes(function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, backend="dsv4_piecewise", dynamic=True, options={"split_ops": SPLIT_OPS})
    for n in (8, 6, 1) * 3:
        x = rows(n)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x.clone()), function(x.clone()))
    assert dsv4_compile.counters.captures == 3


@pytest.mark.parametrize("settings", [HOST, OFF], ids=["host", "off"])
def test_a_kernel_that_does_not_share_where_its_fake_does(settings: Mapping[str, Any]) -> None:
    options = {"split_ops": SPLIT_OPS, **settings}
    compiled = torch.compile(lambda x: attend(*ops.apart(x + 1)), backend="dsv4_piecewise", options=options)
    wanted = r"parts::apart\.default gave results with memory of their own, .*test_joined_call\.py:\d+"
    with torch.no_grad(), pytest.raises(LayoutMismatchError, match=wanted):
        compiled(rows(8))


def test_it_is_the_op_still_that_a_plan_shows_and_counts_tokens_by() -> None:
    options = {"split_ops": ("parts::list_of_thirds",)}
    plan = dsv4_compile.explain(
        lambda w, x: attend(*ops.list_of_thirds(x + w)), torch.ones(1), rows(5), options=options
    )
    (region,) = plan.regions
    assert [(op.op, op.reason) for op in region.ops] == [("parts::list_of_thirds", "split op")]
    assert "= x.size()[0] (tokens)" in str(plan)


def test_calls_are_equal_if_they_call_the_same() -> None:
    def parts(x: Tensor) -> Sequence[Tensor]:
        return x.chunk(2)

    one, same, other = JoinedCall(parts, ((0, 1),)), JoinedCall(parts, ((0, 1),)), JoinedCall(parts, ((1, 0),))
    assert one == same
    assert hash(one) == hash(same)
    assert other not in (one, parts)
    assert one.__name__ == "parts"
