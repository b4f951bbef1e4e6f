"""Compares a compiled function with eager over several calls: results, strides, written inputs, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def compile_piecewise(function: Callable[..., Any], **options: Any) -> Any:
    """Compiled as one graph for every size, on the host engine."""
    given = {"runner": "mrv2", "engine": "host", **options}
    return torch.compile(function, backend="dsv4_piecewise", dynamic=True, fullgraph=True, options=given)


def check_calls(function: Callable[..., Any], calls: Sequence[Sequence[Any]], **options: Any) -> None:
    """Every call gives what eager gives, layout and written inputs included."""
    compiled = compile_piecewise(function, **options)
    for number, args in enumerate(calls):
        wanted, written = outcome(function, args)
        given, rewritten = outcome(compiled, args)
        assert_same(f"call {number}", given, wanted)
        assert_same(f"call {number}, inputs", rewritten, written)


def outcome(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """What a call gives, and its arguments afterwards; those passed stay as they are."""
    own = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    for arg, original in zip(own, args, strict=True):
        if hasattr(original, "_dynamo_unbacked_indices"):
            torch._dynamo.decorators.mark_unbacked(arg, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        return function(*own), own


def assert_same(what: str, given: Any, wanted: Any) -> None:
    """The same numbers in the same layout."""
    found, expected = pytree.tree_leaves(given), pytree.tree_leaves(wanted)
    assert len(found) == len(expected), what
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.stride() == other.stride(), what
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")
        else:
            assert one == other, what


def unbacked(n: int, *shape: int) -> torch.Tensor:
    """A tensor whose first size no graph may be specialised to."""
    tensor = torch.arange(float(n)).reshape(n, *[1 for _ in shape]).expand(n, *shape).contiguous()
    torch._dynamo.decorators.mark_unbacked(tensor, 0)
    return tensor


def plain_assert(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An assert as users write it; pytest rewrites those of test files."""
    assert (x < 5).all(), "too many"
    return y * 2
