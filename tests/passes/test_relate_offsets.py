"""What goes by places in a storage shows what it shows in eager, in the caller's tensors and in slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from seen_alike import COMPILED, HOST, MINIMAL, OFF, assert_alike
from torch import Tensor

import dsv4_compile
from dsv4_compile import counters

aten = torch.ops.aten
fresh = torch.ops.toy.fresh
every_option = pytest.mark.parametrize("options", [HOST, OFF, MINIMAL, COMPILED], ids=["host", "off", "minimal", "aot"])
PLACES = ((3,), (2,), 1)


def window(call: int) -> tuple[Tensor, ...]:
    """Another offset, of another storage, in each call."""
    return (torch.randn(40)[call : call + 16],)


def pair(call: int) -> tuple[Tensor, ...]:
    return torch.randn(8), torch.randn(8)


def views_of_a_slot(a: Tensor) -> Any:
    h = a * 2
    return h, fresh(h), h.as_strided(*PLACES) + 1, torch.as_strided(h[2:], (2,), (3,)) + 1, h.as_strided(*PLACES)


def chain_of_views(a: Tensor) -> Any:
    h = a * 2
    return fresh(h), h.as_strided((4,), (2,), 1).as_strided((2,), (1,), 3) + 1, h


def copies_of_a_slot(a: Tensor) -> Any:
    h = a * 2
    copies = torch.as_strided_copy(h, *PLACES), aten.as_strided_copy(h, [3], [2]), torch.as_strided_copy(h[2:], *PLACES)
    return h, fresh(h), *copies, torch.as_strided_copy(h, *PLACES, out=torch.empty(3))


def scattered_in_a_slot(a: Tensor) -> Any:
    h, zeros = a * 2, torch.zeros(3)
    return (
        h,
        fresh(h),
        torch.as_strided_scatter(h, zeros, *PLACES),
        h.as_strided_scatter(zeros, (3,), (2,), storage_offset=1),
        aten.as_strided_scatter.default(h, zeros, [3], [1], None),
        torch.as_strided_scatter(h[2:], zeros, *PLACES),
    )


def scattered_after_a_region(a: Tensor) -> Any:
    h = fresh(a) + 1
    h.mul_(2)
    s = torch.as_strided_scatter(h, torch.zeros(3), *PLACES)
    h.add_(1)
    return h, s, fresh(s) * 2


def by_keyword(a: Tensor) -> Any:
    h = a * 2
    view = torch.as_strided(input=h, size=(3,), stride=(2,), storage_offset=1)
    scattered = torch.as_strided_scatter(input=h, src=torch.zeros(3), size=(3,), stride=(2,), storage_offset=1)
    return fresh(h), view + 1, scattered


def in_place_spelling(a: Tensor) -> Any:
    h = fresh(a * 2) + 1
    return h.as_strided_((4,), (2,), 1), fresh(h), h + 1


def views_of_an_input(a: Tensor) -> Any:
    around = a.as_strided((30,), (1,), 0)
    return fresh(a * 2), around, around * 2, a[2:].as_strided((2,), (2,), 3) + 1, a[2:].as_strided((2,), (2,)) + 1


def copies_of_an_input(a: Tensor) -> Any:
    scattered = torch.as_strided_scatter(a, torch.zeros(3), *PLACES)
    return fresh(a * 2) + a, torch.as_strided_copy(a, (30,), (1,), 0), scattered, fresh(scattered)


def written_input(a: Tensor) -> Any:
    a.add_(1)
    a.as_strided((30,), (1,), 0).mul_(2)
    return fresh(a * 2) + a


def asked_for_its_storage(a: Tensor) -> Any:
    return fresh(a * 2) + a.untyped_storage().size()


@pytest.mark.sampled(3)
@every_option
@pytest.mark.parametrize(
    "function",
    [
        views_of_a_slot,
        chain_of_views,
        copies_of_a_slot,
        scattered_in_a_slot,
        scattered_after_a_region,
        by_keyword,
        in_place_spelling,
        views_of_an_input,
        copies_of_an_input,
        written_input,
        asked_for_its_storage,
    ],
    ids=lambda function: function.__name__,
)
def test_places_in_a_storage_are_those_of_eager(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    assert_alike(function, window, **options)


def test_a_tensor_that_gets_other_memory_in_place() -> None:
    def f(a: Tensor, b: Tensor) -> Any:
        h = a * 2
        h.set_(b)
        return fresh(h) + 1, h * 3

    assert_alike(f, pair)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.complex64], ids=str)
def test_a_view_of_another_dtype(dtype: torch.dtype) -> None:
    def f(a: Tensor) -> Any:
        h = a * 2
        return h.view(dtype), fresh(h).view(dtype), a.view(dtype), h[1:].view(dtype) + 1

    assert_alike(f, lambda call: (torch.randn(8, 4),))


def test_real_and_complex_views() -> None:
    def f(a: Tensor) -> Any:
        h = a * 2
        c = torch.view_as_complex(fresh(h))
        return torch.view_as_complex(h), c * 2, torch.view_as_real(c), torch.view_as_real(c.conj().resolve_conj()) + 1

    assert_alike(f, lambda call: (torch.randn(8, 2),))


def test_the_plan_says_why_a_copy_by_places_is_eager() -> None:
    plan = dsv4_compile.explain(lambda a: torch.as_strided_copy(a * 2, *PLACES), torch.randn(8))
    assert "reads memory by its place in a storage, which a captured graph may move" in str(plan)


def test_a_written_input_that_is_viewed_by_places_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    with counters.expect(captures=0, uncaptured_calls=4):
        assert_alike(written_input, window)
    assert caplog.text.count("l_a_ is written, moves, and is viewed by places in its storage") == 1


def test_static_inputs_are_viewed_where_they_are() -> None:
    memory = torch.randn(40)
    table = memory[3:19]
    torch._dynamo.mark_static_address(table)

    def f(a: Tensor) -> Any:
        return fresh(a * 2) + 1, table.as_strided((16,), (1,), 0) + a

    with counters.expect(captures=1, replays=3):
        assert_alike(f, lambda call: (torch.randn(16),))
