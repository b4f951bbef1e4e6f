"""Outputs of captured calls are the caller's: fresh, and sharing memory with inputs and each other as in eager.

`Pair` keeps every result alive and compares which of results, arguments and module state share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from case_helpers import Pair, rows
from runtime_helpers import HOST, Allocations, call_often, compile_host
from runtime_helpers import allocations as allocations  # a fixture
from torch import Tensor, nn

from dsv4_compile import counters

toy = torch.ops.toy


def of_input(x: Tensor) -> Any:
    h = toy.fresh(x * 2)
    return x, h, x[1:], x.t(), h + 1


def of_one_base(x: Tensor) -> Any:
    h = toy.fresh(x * 2) + 1
    return h, h[1:], h.view(-1), h.t()[2]


def views_only(x: Tensor) -> Any:
    h = toy.fresh(x * 2) + 1
    return h[1:], h[:1], h.unflatten(1, (2, 2))


def of_eager_result(x: Tensor) -> Any:
    h = toy.fresh(x * 2)
    return h, h[1:], h.reshape(2, -1) if h.shape[0] % 2 == 0 else h.t()


def same_twice(x: Tensor) -> Any:
    h = toy.fresh(x * 2) + 1
    return h, h, {"again": [h, (h.t(), None, 3, x.shape[0], "text")]}


def chunks(x: Tensor) -> Any:
    h = toy.fresh(x * 2) + 1
    left, right = h.chunk(2, dim=1)
    return (right, left, toy.fresh(left), *h.unbind(1))


def written_view(x: Tensor) -> Any:
    h = toy.fresh(x * 2) + 1
    h[1:].mul_(2)
    toy.attn(x, h[:, :4])
    return h[1:], h


def allocated(x: Tensor) -> Any:
    h = x * 2
    out = torch.empty_like(h)
    toy.attn(h, out)
    return out, out[1:], h


def of_written_input(x: Tensor) -> Any:
    x.add_(1)
    return toy.fresh(x), x, x[1:]


def reinterpreted(x: Tensor) -> Any:
    h = toy.fresh(x * 2) + 1
    return h, h.view(torch.int32), h.expand(3, *h.shape), h.as_strided((2, 2), (1, 2))


ALIASES = [
    of_input,
    of_one_base,
    views_only,
    of_eager_result,
    same_twice,
    chunks,
    written_view,
    allocated,
    of_written_input,
    reinterpreted,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", ALIASES, ids=lambda f: f.__name__)
def test_outputs_share_memory_as_in_eager(function: Callable[[Tensor], Any]) -> None:
    pair = Pair(function, HOST)
    for n in (5, 6, 5, 6, 5, 6, 6, 5, 5, 5):
        pair(rows(n))


def test_static_outputs_share_memory_as_in_eager() -> None:
    def f(x: Tensor) -> Any:
        return [function(x.clone()) for function in (of_input, of_one_base, chunks, allocated, of_written_input)]

    pair = Pair(f, HOST, static_outputs=True)
    for n in (5, 6) * 4:
        pair(rows(n))


@pytest.mark.parametrize("function", ALIASES, ids=lambda f: f.__name__)
def test_writing_to_an_output_shows_where_it_does_in_eager(function: Callable[[Tensor], Any]) -> None:
    compiled = compile_host(function)
    for n in (5, 6) * 4:
        x = rows(n)
        y = x.clone()
        with torch.no_grad():
            results, wanted = _tensors(compiled(x)), _tensors(function(y))
            for index in range(len(wanted)):
                if wanted[index].is_contiguous() and not wanted[index]._is_view():
                    results[index].fill_(index)
                    wanted[index].fill_(index)
        assert torch.equal(x, y)
        assert all(map(torch.equal, results, wanted))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def test_input_that_is_returned_is_the_same_object() -> None:
    compiled = compile_host(of_input)
    call_often(compiled, rows(5))
    x = rows(5)
    with torch.no_grad():
        same, _, view, *_ = compiled(x)
    assert same is x
    assert view._base is x


def test_buffer_and_parameter_that_are_returned_are_the_models() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4), requires_grad=False)
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor) -> Any:
            self.count.add_(1)
            return toy.fresh(x * self.w), self.count, self.w, self.count[1:]

    model = Model()
    pair = Pair(model, HOST)
    for n in (5, 6) * 3:
        _, count, w, tail = pair(rows(n))
        assert count is model.count
        assert w is model.w
        assert tail._base is model.count


def test_results_of_many_calls_stay_what_they_were() -> None:
    compiled = compile_host(lambda x: (toy.fresh(x) + 1, x * 3))
    held, copies = [], []
    with torch.no_grad():
        for n in (5, 6, 7) * 8:
            results = compiled(rows(n))
            held += results
            copies += [result.clone() for result in results]
    assert all(map(torch.equal, held, copies))
    assert len({result.data_ptr() for result in held}) == len(held)


def test_output_fed_back_as_input() -> None:
    pair = Pair(lambda x: toy.fresh(x.sin()) * 0.7, HOST)
    for n in (5, 6, 5):
        y = rows(n)
        for _ in range(6):
            y = pair(y)


def test_output_fed_back_into_a_written_input() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(0.5)
        return toy.fresh(x) + 1

    pair = Pair(f, HOST)
    y = rows(5)
    for _ in range(10):
        y = pair(y)


def test_static_output_fed_back_as_input() -> None:
    """The buffer of the bucket is input and output of one call: it is copied in before it is overwritten."""
    compiled = compile_host(lambda x: toy.fresh(x.sin()) * 0.7 + x, static_outputs=True)
    y = wanted = rows(5)
    with torch.no_grad():
        for _ in range(8):
            y = compiled(y)
            wanted = toy.fresh(wanted.sin()) * 0.7 + wanted
            assert torch.equal(y, wanted)


def test_static_output_fed_back_as_an_input_that_is_written() -> None:
    """What was written to the copy of the input goes back to the buffer before the new output does."""

    def step(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        c = a + 1
        b.mul_(0.5)
        return toy.fresh(b) * 2, c

    compiled = compile_host(step, static_outputs=True)
    given = rows(5), rows(5)
    wanted = tuple(tensor.clone() for tensor in given)
    with torch.no_grad():
        for _ in range(9):
            given, wanted = compiled(*given), step(*wanted)
            assert all(map(torch.equal, given, wanted))


def test_static_outputs_belong_to_the_bucket_and_lie_outside_of_the_arena(allocations: Allocations) -> None:
    allocations.holds = True
    compiled = compile_host(lambda x: (toy.fresh(x) + 1, x * 3), static_outputs=True)
    xs = {n: rows(n) for n in (5, 6)}
    first = {n: call_often(compiled, x) for n, x in xs.items()}
    addresses = {n: [result.data_ptr() for result in results] for n, results in first.items()}
    assert len({address for both in addresses.values() for address in both}) == 4
    arena = next(memory for memory in allocations.memories if memory.numel() == max(allocations.sizes))
    start, end = arena.data_ptr(), arena.data_ptr() + arena.numel()
    assert not any(start <= address < end for both in addresses.values() for address in both)
    copied = first[5][0].clone()
    call_often(compiled, xs[6])
    assert torch.equal(first[5][0], copied)  # another bucket has buffers of its own
    with torch.no_grad():
        second = compiled(2 * xs[5])
    assert [result.data_ptr() for result in second] == addresses[5]
    assert torch.equal(first[5][0], 4 * xs[5] + 1)  # overwritten by the next call of its bucket


def test_fresh_outputs_do_not_keep_the_arena(allocations: Allocations) -> None:
    compiled = compile_host(lambda x: toy.fresh(x) + 1)
    result = call_often(compiled, rows(5))
    assert result.untyped_storage().nbytes() == 5 * 4 * 4
    assert len(allocations.made) == 1


def test_strides_of_an_output_are_those_of_eager() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.empty_strided((x.shape[0], 4), (8, 1))
        toy.attn(x * 1, y)
        return y

    compiled = compile_host(f)
    for _ in range(3):
        with torch.no_grad():
            assert compiled(rows(5)).stride() == (8, 1)


@pytest.mark.parametrize(
    "make",
    [lambda x: x.t().contiguous().t(), lambda x: x.view(-1, 2, 2).transpose(0, 2), lambda x: x[0, 0], lambda x: x[:0]],
)
def test_layouts_of_outputs(make: Callable[[Tensor], Tensor]) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = make(x.sin()) * 2
        return y, toy.fresh(y)

    compiled = compile_host(f)
    for n in (5, 6) * 3:
        x = rows(n)
        with torch.no_grad():
            for result, wanted in zip(compiled(x), f(x), strict=True):
                assert torch.equal(result, wanted)
                assert result.stride() == wanted.stride()


def test_no_tensor_among_the_outputs() -> None:
    def f(x: Tensor, cache: Tensor) -> tuple[int, None]:
        cache.add_(toy.fresh(x).sum())
        return x.shape[0] * 2, None

    pair = Pair(f, HOST)
    cache = torch.zeros(3)
    with counters.expect(captures=2):
        for n in (5, 6) * 3:
            assert pair(rows(n), cache) == (2 * n, None)


def test_outputs_under_inference_mode_and_outside_of_it() -> None:
    compiled = compile_host(of_one_base)
    for mode in (torch.no_grad, torch.inference_mode) * 4:
        with mode():
            results = compiled(rows(5))
        assert all(result.is_inference() == (mode is torch.inference_mode) for result in results)
        assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize(("outer", "inner"), [(torch.no_grad(), True), (torch.inference_mode(), False)])
def test_outputs_of_an_inference_mode_block(outer: AbstractContextManager[None], inner: bool) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode(inner):
            y = x * 2
            parts = toy.tup(y)
            a, b = (y + 1).chunk(2, 1)
        return y, *parts, a, b, y[1:], y + 1

    compiled = compile_host(f)
    for n in (5, 6) * 3:
        with outer:
            results, wanted = compiled(rows(n)), f(rows(n))
        assert [one.is_inference() for one in results] == [one.is_inference() for one in wanted]
        assert sum(one.is_inference() for one in results) == (6 if inner else 1)
        assert not torch.is_inference_mode_enabled()
