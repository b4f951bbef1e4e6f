"""Programs that torch allows and that break simple partitioners: each must agree with eager, call after call.

The kind of each was found by an attack on this package or seen in reports on others; `test_cases*.py` has the numbered
reports. What cannot be supported is refused by name, in `test_refusals.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import odd_ops  # noqa: F401
import pytest
import torch
from footgun_tools import PLANS, agrees, pair
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from toy_ops import SPLIT

toy, odd = torch.ops.toy, torch.ops.odd


# Results that are nothing, or that are memory of somebody else.
def body_without_result(x: Tensor) -> None:
    x.add_(1)
    toy.tick(x)


def checkpoint_without_result(x: Tensor, y: Tensor) -> Tensor:
    h = x + 1
    checkpoint(body_without_result, h, use_reentrant=False)
    return h * 2


def empty_list(x: Tensor, y: Tensor) -> Tensor:
    h = x + 1
    odd.no_list(h)
    return toy.fresh(h)


def view_and_fresh_before_a_write(x: Tensor, y: Tensor) -> Tensor:
    toy.fresh(y)
    _, fresh = odd.view_and_fresh(x)
    toy.attn(y, x)
    return fresh


def view_of_a_written_argument(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    rest = odd.rest_of(x)
    g = toy.fresh(rest)
    rest.mul_(g)
    return g, rest


def view_from_a_checkpoint(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    view, g = checkpoint(lambda x: (x[1:], x * 2), x, use_reentrant=False)
    toy.attn(g[1:], view)
    return view, g


def base_and_view_from_a_checkpoint(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h, view = checkpoint(lambda x: (lambda h: (h, h[:2]))(x * 2), x, use_reentrant=False)
    g = toy.fresh(h)
    view.add_(g[:2])
    return h, view


def results_that_share_memory(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    whole, part = odd.copies(x)
    g = toy.fresh(whole)
    part.add_(g[:2])
    return whole, toy.fresh(whole)


def detached_in_place(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = (x * 2).unsqueeze_(0)
    same = h.detach_()
    g = toy.fresh(same.squeeze_(0))
    return g, same, h


def lists_in_tuples(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    one, (two, three) = odd.list_in_tuple(x)
    g = toy.fresh(two)
    two.add_(g)
    four, five = odd.list_in_tuple.default(one)
    return toy.fresh(five[0]), two, three.mul_(2), four


def unsafe_chunks(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = x + 1
    left, right = torch.unsafe_chunk(h, 2, 1)
    g = toy.fresh(left.contiguous())
    right.add_(g)
    return h, left


def chunk_as_output(x: Tensor, y: Tensor) -> Tensor:
    left, right = (x * 3).chunk(2, -1)
    toy.attn(left, right)
    return left


def lists_of_tensors_written(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, h = torch.empty_like(x), x * 2
    toy.tick(h)
    odd.all_outs(x, [a, h], [None, y])
    g = toy.fresh(h)
    torch._foreach_add_([a, y], [g, g])
    return a, g, y


# One Python object with two names; metadata changed in place.
def shape_of_a_result_changed(x: Tensor, y: Tensor) -> Tensor:
    h = x + 1
    same = h.add_(1)
    same.unsqueeze_(0)
    return toy.fresh(h)


def shape_of_the_same_tensor_changed(x: Tensor, y: Tensor) -> Tensor:
    h = x + 1
    same = h.contiguous()
    same.t_()
    return toy.fresh(h)


def shape_changed_through_an_overload(x: Tensor, y: Tensor) -> Tensor:
    h = x + 1
    torch.ops.aten.unsqueeze_.default(h, 0)
    return toy.fresh(h)


def memory_swapped(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h, g = x + 1, x * 2
    h.set_(g)
    h.add_(1)
    return toy.fresh(h), g


# Views of every kind.
def numbers_seen_as_others(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h = x * 2
    bits = h.view(torch.int32)
    toy.fresh(h)
    bits.add_(1)
    pairs = torch.view_as_complex(h.view(-1, 2, 2))
    real = toy.fresh(pairs.real)
    pairs.mul_(2)
    return h, real, pairs.imag, pairs.conj()


def conjugates(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    pairs = torch.complex(x, y)
    conj = pairs.conj()
    g = toy.fresh(x)
    pairs.add_(1)
    return toy.fresh(conj.real) + g, conj.imag, conj.resolve_conj(), toy.fresh(conj.imag)


def scalars(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    total, three = x.sum(), torch.tensor(3.0)
    g = toy.fresh(total)
    total.add_(1)
    toy.attn(total, three)
    y[0, 0] = total
    return g + three, y, total[None]


def views_of_views(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    h = x + 1
    corner = h[:, :2][1:].t()
    g = toy.fresh(h)
    corner.add_(g[1:, :2].t())
    return toy.fresh(h), corner


def views_by_strides_and_offset(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    h, g = y * 2, toy.fresh(x)
    out = torch.empty_like(x)
    toy.attn(x, out)
    corners = [owner.as_strided((2, 2), (4, 1), 1) for owner in (h, g, out)]
    corners[0].add_(1)
    return g + h, *(toy.fresh(corner) for corner in corners), corners[2]


def writes_of_every_kind(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.tensor([0, 2, 1])
    x.index_copy_(0, rows, y[:3]).scatter_(1, torch.zeros(5, 1, dtype=torch.long), 9.0)
    toy.fresh(x)
    x[1:3, [0, 2]] = 0.5
    x.index_fill_(0, rows, 1.0)
    torch.sigmoid_(y)
    values, indices = torch.empty(5), torch.empty(5, dtype=torch.long)
    torch.max(x, -1, out=(values, indices))
    toy.fresh(values)
    return x.clamp_(0, 1), values + indices


def loop_over_data(x: Tensor, y: Tensor) -> Tensor:
    def more(i: Tensor, a: Tensor) -> Tensor:
        return i < 3

    def body(i: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, a * 2

    _, result = torch._higher_order_ops.while_loop(more, body, (torch.tensor(0), x))
    return toy.fresh(result) + 1


AGREE = (
    checkpoint_without_result,
    empty_list,
    view_and_fresh_before_a_write,
    view_of_a_written_argument,
    view_from_a_checkpoint,
    base_and_view_from_a_checkpoint,
    results_that_share_memory,
    detached_in_place,
    lists_in_tuples,
    unsafe_chunks,
    chunk_as_output,
    lists_of_tensors_written,
    shape_of_a_result_changed,
    shape_of_the_same_tensor_changed,
    shape_changed_through_an_overload,
    memory_swapped,
    numbers_seen_as_others,
    conjugates,
    scalars,
    views_of_views,
    views_by_strides_and_offset,
    writes_of_every_kind,
    loop_over_data,
)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("plan", PLANS, ids=" ".join)
@pytest.mark.parametrize("fn", AGREE, ids=lambda fn: fn.__name__)
def test_agrees_with_eager(fn: Callable[..., Any], plan: tuple[str, str, str]) -> None:
    runner, region, engine = plan
    with torch.no_grad():
        agrees(fn, pair, options={"split_ops": SPLIT, "engine": engine, "runner": runner, "region": region})


def test_a_list_in_a_tuple_from_a_split_op() -> None:
    options = {"split_ops": (*SPLIT, "odd::list_in_tuple")}
    with torch.no_grad():
        agrees(lists_in_tuples, pair, options=options)
