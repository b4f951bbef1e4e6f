"""A value that is conjugated or negated lazily keeps its bit wherever it lives: in slots, in pieces, for the caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from seen_alike import COMPILED, HOST, MINIMAL, OFF, assert_alike
from torch import Tensor

import dsv4_compile
from dsv4_compile import counters

fresh = torch.ops.toy.fresh
every_option = pytest.mark.parametrize(
    "options",
    [HOST, OFF, MINIMAL, COMPILED, {"check": "full"}, {"aux_streams": 2}],
    ids=["host", "off", "minimal", "aot", "check", "streams"],
)


def real(call: int) -> tuple[Tensor, ...]:
    return (torch.randn(8),)


def complex_pairs(call: int) -> tuple[Tensor, ...]:
    return (torch.randn(8, dtype=torch.complex64),)


def conjugated(call: int) -> tuple[Tensor, ...]:
    return (torch.randn(8, dtype=torch.complex64).conj(),)


def negated(call: int) -> tuple[Tensor, ...]:
    return (torch.randn(8, dtype=torch.complex64).conj().imag,)


def made_by_an_op(x: Tensor) -> Any:
    return torch.fft.ihfft(x * 2)


def made_and_crossing(x: Tensor) -> Any:
    c = torch.fft.ihfft(x * 2)
    return c, fresh(c.imag), c * 2, c.imag, torch.view_as_real(c.resolve_conj()) + 1, c[1:]


def made_after_a_region(x: Tensor) -> Any:
    c = torch.fft.ihfft(fresh(x))
    d = c + 1
    return fresh(d.real), c, c.conj(), c.resolve_conj()


def views_of_a_slot(x: Tensor) -> Any:
    h = (x * 2).reshape(4, 2)
    c = h.conj()
    return (
        c,
        c * 2,
        c.imag,
        h.mH,
        h.mH @ h,
        c.conj(),
        c[1:],
        h[1:].conj(),
        fresh(c.real),
        c.unsqueeze(0),
        c.contiguous(),
    )


def written_through_a_view(x: Tensor) -> Any:
    h = x * 2
    h.conj().add_(1j)
    h.conj().imag.mul_(3)
    return h, fresh(h.real), h.conj().mul_(2), h + 1


def of_an_input(x: Tensor) -> Any:
    return x, x * 2, fresh(x + 1), x + 1, x[1:], x.resolve_conj().resolve_neg()


def written_input(x: Tensor) -> Any:
    x.add_(1)
    return fresh(x * 2) + x, x


def condition_and_copies(x: Tensor) -> Any:
    c = (x * 2).conj()
    return torch.where(c.real > 0, c, x), torch.empty_like(c).copy_(c), c.clone(), fresh(c.abs()), torch.stack([c, x])


@pytest.mark.sampled(5)
@every_option
@pytest.mark.parametrize(
    ("function", "make"),
    [
        (made_by_an_op, real),
        (made_and_crossing, real),
        (made_after_a_region, real),
        (views_of_a_slot, complex_pairs),
        (written_through_a_view, complex_pairs),
        (of_an_input, conjugated),
        (of_an_input, negated),
        (written_input, conjugated),
        (written_input, negated),
        (condition_and_copies, complex_pairs),
    ],
    ids=lambda value: value.__name__,
)
def test_bits_are_those_of_eager(
    function: Callable[..., Any], make: Callable[[int], tuple[Tensor, ...]], options: Mapping[str, Any]
) -> None:
    assert_alike(function, make, **options)


def test_values_with_a_bit_are_captured() -> None:
    with counters.expect(captures=1, replays=3, traced_graph_calls=0):
        assert_alike(made_and_crossing, real)


@pytest.mark.inductor
def test_what_takes_or_gives_a_bit_is_not_compiled() -> None:
    def f(x: Tensor) -> Any:
        c = torch.fft.ihfft(x * 2)
        return c, fresh(c.imag) + 1

    plan = dsv4_compile.explain(f, torch.randn(8), options={"piece_compiler": "inductor", "split_ops": ("toy::fresh",)})
    assert "is conjugated or negated when it is read" in str(plan)
    assert_alike(f, real, piece_compiler="inductor")
