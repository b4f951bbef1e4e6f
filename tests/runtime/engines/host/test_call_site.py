"""Kernels in Python see the state of their call in a warm-up and in a capture too, and may use what needs it.

Each is called twice by a function, with a split op between: captured, and compared with eager over four calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from seen_alike import HOST, MINIMAL, OFF, assert_alike
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

from dsv4_compile import counters

fresh = torch.ops.toy.fresh
LIBRARY = Library("call_site", "DEF")
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
OPS: dict[str, Any] = {}


def kernel(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Register a function as the CPU kernel of an op, whose result is like its argument."""
    name = function.__name__
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"call_site::{name}", torch.empty_like, lib=LIBRARY)
    OPS[name] = getattr(torch.ops.call_site, name)
    return function


@kernel
def casts(x: Tensor) -> Tensor:
    return (x @ WEIGHT).float()


@kernel
def asks(x: Tensor) -> Tensor:
    modes = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return x + sum(10**place for place, is_on in enumerate(modes) if is_on)


@kernel
def casts_in_a_block(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inner = x @ WEIGHT
        with torch.autocast("cpu", enabled=False):
            inner = inner.float() @ WEIGHT
    return torch.ops.call_site.casts(inner) + torch.ops.call_site.asks(x)


@kernel
def differentiates(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((y**3).sum(), y)
    return gradient


@kernel
def takes_tangents(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x)).sin()
        tangent: Tensor = forward_ad.unpack_dual(dual).tangent
    return tangent.clone()


@kernel
def maps(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.sin().cumsum(0))(x)


@kernel
def functionalizes(x: Tensor) -> Tensor:
    return torch.func.functionalize(lambda value: value.clone().add_(1))(x)  # type: ignore[no-any-return]


@kernel
def has_sparse_parts(x: Tensor) -> Tensor:
    indices = torch.tensor([[0, 1], [1, 2]])
    return torch.sparse_coo_tensor(indices, x[0, :2], (4, 4)).to_dense() + x


@kernel
def has_nested_parts(x: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(torch.nested.nested_tensor([x, x[:2]]), 0.0)[0]


def under_autocast(op: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = op(x * 2)
        return y, op(fresh(y)), op(x)

    return function


def in_inference_mode(op: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Any:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = op(x * 2)
        return op(fresh(y) + 1)

    return function


@pytest.mark.sampled(5)
@pytest.mark.parametrize("settings", [HOST, OFF, MINIMAL], ids=["host", "off", "minimal"])
@pytest.mark.parametrize("around", [under_autocast, in_inference_mode])
@pytest.mark.parametrize("name", ["casts", "asks", "casts_in_a_block"])
def test_modes_of_the_call(name: str, around: Callable[..., Any], settings: dict[str, Any]) -> None:
    assert_alike(around(OPS[name]), lambda call: (torch.randn(4, 4),), **settings)


def test_modes_of_the_caller() -> None:
    compiled = torch.compile(OPS["casts_in_a_block"], backend="dsv4_piecewise")
    for is_on in (True, False) * 4:
        x = torch.randn(4, 4)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            torch.testing.assert_close(compiled(x), OPS["casts_in_a_block"](x))
    assert counters.captures == 2


@pytest.mark.parametrize("settings", [HOST, OFF], ids=["host", "off"])
@pytest.mark.parametrize("name", ["differentiates", "takes_tangents", "maps", "functionalizes"])
def test_what_autograd_and_transforms_do(name: str, settings: dict[str, Any]) -> None:
    assert_alike(under_autocast(OPS[name]), lambda call: (torch.randn(4, 4),), **settings)
    assert counters.replans == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["has_sparse_parts", "has_nested_parts"])
def test_tensors_that_are_no_plain_memory_make_the_op_eager(name: str) -> None:
    assert_alike(under_autocast(OPS[name]), lambda call: (torch.randn(4, 4),), calls=6, **HOST)
    assert counters.replans > 0
    assert counters.replays > 0


def test_a_rule_of_autocast_is_kept() -> None:
    LIBRARY.define("ruled(Tensor x) -> Tensor")
    LIBRARY.impl("ruled", lambda x: (x @ WEIGHT.to(x.dtype)).float(), "CPU")
    torch.library.register_fake("call_site::ruled", lambda x: torch.empty_like(x, dtype=torch.float32), lib=LIBRARY)
    torch.library.register_autocast("call_site::ruled", "cpu", torch.float16, lib=LIBRARY)
    assert_alike(under_autocast(torch.ops.call_site.ruled), lambda call: (torch.randn(4, 4),), **HOST)
