"""A result that is memory of an argument: the argument itself where eager gives it, a tensor of its own elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from seen_alike import assert_alike
from torch import Tensor

fresh = torch.ops.toy.fresh
aten = torch.ops.aten


def rows(call: int) -> tuple[Tensor, ...]:
    return (torch.randn(8, 4),)


def one_chunk_of_an_input(x: Tensor) -> Any:
    return torch.unsafe_split(x, x.shape[0])[0], fresh(x)


def one_chunk_in_other_spellings(x: Tensor) -> Any:
    h = x * 2
    return h, torch.unsafe_chunk(x, 1), h.unsafe_split_with_sizes([h.shape[0]]), fresh(h), torch.unsafe_chunk(h, 1)


def written_after_the_split(x: Tensor) -> Any:
    h = x * 2
    (part,) = torch.unsafe_chunk(h, 1)
    h.add_(1)
    return part, fresh(part) + 1, h


def the_argument_itself(x: Tensor) -> Any:
    h = x * 2
    of_input = x.contiguous(), x.to(torch.float32), x.add_(1), x.real, x.positive(), x.resolve_conj(), x.expand_as(x)
    of_slot = h, h.contiguous(), h.to(torch.float32), h.add_(1), h.real, h.reshape(8, 4), h.view(8, 4), h.detach()
    return *of_input, *of_slot, fresh(h), x


def out_argument(x: Tensor) -> Any:
    out = torch.empty_like(x)
    return torch.add(x, 1, out=out), out, fresh(out), torch.mul(x, 2, out=x)


def aliases(x: Tensor) -> Any:
    h = x * 2
    return aten.alias(x), aten.alias(h), h, aten._unsafe_view(h, [4, 8]), aten._reshape_alias(h, [32], [1]), fresh(h)


def other_memory(x: Tensor) -> Any:
    h, other = x * 2, x + 1
    return aten.set_.source_Tensor(h, other), other, h, fresh(h) + 1


@pytest.mark.parametrize(
    "function",
    [
        one_chunk_of_an_input,
        one_chunk_in_other_spellings,
        written_after_the_split,
        the_argument_itself,
        out_argument,
        aliases,
        other_memory,
    ],
    ids=lambda function: function.__name__,
)
def test_results_are_the_objects_that_eager_gives(function: Callable[..., Any]) -> None:
    assert_alike(function, rows)


def test_a_result_of_a_body_that_is_a_lazy_view_of_an_argument() -> None:
    """A checkpointed body is one node, whose result is a view of what it takes, with another lazy bit."""

    def f(x: Tensor) -> Any:
        h = x * 2
        view = torch.utils.checkpoint.checkpoint(lambda t: t.conj()[1:], h, use_reentrant=False)
        return view, view * 2, fresh(h), h

    assert_alike(f, lambda call: (torch.randn(8, 4, dtype=torch.complex64),))
