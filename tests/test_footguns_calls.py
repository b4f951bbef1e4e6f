"""Calls that differ from the first one in what Dynamo does not guard, and modes and numbers around a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import odd_ops  # noqa: F401
import pytest
import torch
from footgun_tools import PLANS, agrees, pair
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from toy_ops import LOG, SPLIT, Host

toy, odd = torch.ops.toy, torch.ops.odd
plans = pytest.mark.parametrize("plan", PLANS, ids=" ".join)
Plan = tuple[str, str, str]


def options_of(plan: Plan, **more: Any) -> dict[str, Any]:
    runner, region, engine = plan
    return {"split_ops": SPLIT, "engine": engine, "runner": runner, "region": region, **more}


def rows_from(start: int) -> tuple[Tensor]:
    return (torch.arange(48.0).view(12, 4)[start : start + 5],)


def view_of_a_written_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    rest = odd.rest_of(x)
    g = toy.fresh(rest)
    rest.mul_(g)
    return g, rest


def view_from_a_checkpoint(x: Tensor) -> tuple[Tensor, Tensor]:
    view, g = checkpoint(lambda x: (x[1:], x * 2), x, use_reentrant=False)
    toy.attn(g[1:], view)
    return view, g


@pytest.mark.sampled(3)
@plans
@pytest.mark.parametrize("fn", [view_of_a_written_argument, view_from_a_checkpoint], ids=lambda fn: fn.__name__)
def test_an_input_at_another_offset(fn: Callable[..., Any], plan: Plan) -> None:
    with torch.no_grad():
        agrees(fn, lambda: rows_from(1), lambda: rows_from(3), options=options_of(plan))


@plans
def test_a_view_that_leaves_its_input(plan: Plan) -> None:
    def fn(y: Tensor) -> tuple[Tensor, Tensor]:
        return toy.fresh(y), y.as_strided((y.shape[0], 2), (4, 1), 1).contiguous()

    with torch.no_grad():
        agrees(fn, lambda: (torch.randn(5, 8)[:, 2:6],), options=options_of(plan))


def number_of_data(x: Tensor, y: Tensor) -> Tensor:
    number = x.abs().sum().item()
    return toy.fresh(y * number) + number


def number_of_an_input(x: Tensor, scale: Tensor) -> Tensor:
    return toy.fresh(x * scale.item()) + x


def number_of_a_written_input(x: Tensor, scale: Tensor) -> Tensor:
    h = x * scale.item()
    scale.add_(1)
    return toy.fresh(h) * scale.item()


def rows_that_are_not_zero(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    found = (x > 0).nonzero()
    picked = x[x > 0]
    g = toy.fresh(picked)
    y[:1].add_(g.sum())
    return toy.fresh(found[:, 0] * 2), g * 2, torch.zeros(found.shape[0])


def rows_up_to_a_number(x: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    n = length[0].item()
    torch._check(n >= 0)
    torch._check(n <= x.shape[0])
    view = x[:n]
    toy.fresh(x)
    view.add_(1)
    return toy.fresh(view), x[n:]


def row_by_tensor(x: Tensor, row: Tensor) -> Tensor:
    g = toy.fresh(x[row])
    x[row] = g
    return x


def repeated_rows(x: Tensor, times: Tensor) -> Tensor:
    return toy.fresh(torch.repeat_interleave(x, times, dim=0))


DEPEND_ON_DATA: tuple[tuple[Callable[..., Any], Callable[[int], tuple[Tensor, ...]]], ...] = (
    (number_of_data, lambda i: pair()),
    (number_of_an_input, lambda i: (torch.randn(5, 4), torch.tensor(2.0 + i))),
    (number_of_a_written_input, lambda i: (torch.randn(5, 4), torch.tensor(2.0 + i))),
    (rows_that_are_not_zero, lambda i: pair()),
    (rows_up_to_a_number, lambda i: (torch.randn(5, 4), torch.tensor([2 + i]))),
    (row_by_tensor, lambda i: (torch.randn(5, 4), torch.tensor(2 + i))),
    (repeated_rows, lambda i: (torch.randn(3, 4), torch.tensor([i, 2, 1]))),
)


@pytest.mark.sampled(3)
@plans
@pytest.mark.parametrize(("fn", "make"), DEPEND_ON_DATA, ids=[fn.__name__ for fn, _ in DEPEND_ON_DATA])
def test_data_decides_on_numbers_and_sizes(fn: Callable[..., Any], make: Any, plan: Plan) -> None:
    patch = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with torch.no_grad(), patch:
        agrees(fn, lambda: make(0), lambda: make(1), options=options_of(plan))


@plans
def test_a_number_of_an_input_that_another_input_overlaps_later(plan: Plan) -> None:
    def fn(x: Tensor, scale: Tensor, written: Tensor) -> Tensor:
        written.add_(1)
        return toy.fresh(x * scale.item())

    def overlapping() -> tuple[Tensor, ...]:
        written = torch.zeros(3)
        return torch.randn(5, 4), written[0], written

    def apart() -> tuple[Tensor, ...]:
        return torch.randn(5, 4), torch.tensor(2.0), torch.zeros(3)

    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        agrees(fn, apart, overlapping, options=options_of(plan))


@plans
def test_autocast_around_the_call(plan: Plan) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ y.t()
        g = toy.fresh(h)
        with torch.autocast("cpu", enabled=False):
            return g @ h, x @ y.t()

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        agrees(fn, pair, options=options_of(plan))


@plans
def test_tensors_of_inference_mode(plan: Plan) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        toy.fresh(y)
        copied, cast = x.t().reshape(-1), x.to(torch.bfloat16)
        toy.attn(y, x)
        return copied, cast, toy.fresh(x)

    with torch.inference_mode():
        agrees(fn, pair, options=options_of(plan))


@plans
def test_random_numbers_are_drawn_as_in_eager(plan: Plan) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        early = torch.randn(3)
        g = toy.fresh(x)
        late = torch.rand_like(g) + torch.nn.functional.dropout(g, 0.5, training=True)
        return early, late, toy.fresh(torch.rand(2)), torch.empty_like(y).normal_()

    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=options_of(plan))
    with torch.no_grad():
        for seed in range(4):
            x, y = pair()
            torch.manual_seed(seed)
            expected = [*fn(x, y), torch.rand(1)]
            torch.manual_seed(seed)
            assert all(map(torch.equal, [*compiled(x, y), torch.rand(1)], expected))


@plans
def test_modes_after_an_error_between_two_switches(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            out = torch.empty_like(x)
            toy.hook(x, out)
            return out

    def fail(q: Tensor) -> Tensor:
        raise ValueError("of the user")

    options = options_of(plan, split_ops=(*SPLIT, "toy::hook"))
    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=options)
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(Host, "function", staticmethod(fail))
            with pytest.raises(ValueError, match="of the user"):
                compiled(torch.ones(5, 4))
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.equal(compiled(torch.ones(5, 4)), torch.full((5, 4), 2.0))


@plans
def test_split_ops_with_effects_on_the_host_keep_their_order(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = toy.fresh(x)
        square = first @ first.t()
        out, other = torch.empty_like(square), torch.empty_like(y)
        toy.hook(square, out)
        toy.hook(y, other)  # it needs nothing of what is before it
        return out, other

    def log_shape(q: Tensor) -> Tensor:
        LOG.append(q.shape[1])
        return 2 * q

    monkeypatch.setattr(Host, "function", staticmethod(log_shape))
    with torch.no_grad():
        agrees(fn, pair, options=options_of(plan, split_ops=(*SPLIT, "toy::hook")))


@pytest.mark.exhaustive
def test_a_chain_of_more_views_than_python_has_frames() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(1001):
            x = x.t()
        return toy.fresh(x) + y.t()

    with torch.no_grad():
        agrees(fn, pair, options=options_of(("mrv2", "minimal", "off")))
