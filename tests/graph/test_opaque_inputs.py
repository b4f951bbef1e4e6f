"""Objects that torch does not look into are inputs of a graph like any other, and no op may hide behind one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from toy_ops import LIBRARY

import dsv4_compile
from dsv4_compile.errors import HazardError


class Layer(OpaqueBase):
    """The name of a layer, as serving engines hand it to their ops."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Layer({self.name!r})", {"Layer": Layer}


register_opaque_type(Layer, typ="value", hoist=True)
SCALES = {"first": 2.0, "second": 3.0}
CALLS: list[str] = []


def attend(x: Tensor, out: Tensor, layer: Layer) -> None:
    CALLS.append(layer.name)
    out.copy_(x * SCALES[layer.name])


@pytest.fixture(scope="module", autouse=True)
def _the_op() -> Iterator[None]:
    from torch._library.opaque_object import get_opaque_type_name

    LIBRARY.define(f"attend_layer(Tensor x, Tensor(a!) out, {get_opaque_type_name(Layer)} layer) -> ()")
    LIBRARY.impl("attend_layer", attend, "CompositeExplicitAutograd")
    torch.library.register_fake("toy::attend_layer", lambda x, out, layer: None, lib=LIBRARY)
    return (yield)


def model(x: Tensor) -> Tensor:
    for name in ("first", "second"):
        out = torch.empty_like(x)
        torch.ops.toy.attend_layer(x + 1, out, Layer(name))
        x = out * 2
    return x


def compiled(**options: object):
    return torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)


@torch.no_grad()
@pytest.mark.parametrize("piece_compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_split_op_takes_one_in_every_call(piece_compiler: str) -> None:
    function = compiled(split_ops=["toy::attend_layer"], piece_compiler=piece_compiler)
    for size in (4, 4, 4, 6, 6):
        CALLS.clear()
        x = torch.randn(size, 8)
        assert torch.equal(function(x), ((x + 1) * 4 + 1) * 6)
        assert CALLS == ["first", "second"]
    assert dsv4_compile.counters.captures == 2


@torch.no_grad()
def test_what_is_captured_with_one_is_captured_for_it() -> None:
    dsv4_compile.register_op("toy::attend_layer", role="capture")
    function = compiled()
    for _ in range(3):
        x = torch.randn(4, 8)
        assert torch.equal(function(x), ((x + 1) * 4 + 1) * 6)
    assert dsv4_compile.counters.captures == 1
    assert dsv4_compile.counters.replays == 2


@torch.no_grad()
def test_an_op_without_a_role_may_not_be_captured_with_one() -> None:
    with pytest.raises(HazardError, match=r"op toy::attend_layer.default \(layer\) takes an object through which"):
        compiled()(torch.randn(4, 8))


def test_the_plan_shows_those_of_a_region() -> None:
    plan = dsv4_compile.explain(model, torch.ones(4, 8), options={"split_ops": ["toy::attend_layer"]})
    objects = [value for value in plan.inputs if value.origin == "object"]
    assert [value.layout for value in objects] == ["Layer", "Layer"]


@torch.no_grad()
@pytest.mark.parametrize("mark", [torch._dynamo.decorators.mark_unbacked, torch._dynamo.mark_dynamic])
def test_sizes_may_be_marked_beside_one(mark) -> None:
    function = torch.compile(model, backend="dsv4_piecewise", options={"split_ops": ["toy::attend_layer"]})
    for size in (4, 4, 6, 6, 1):
        x = torch.randn(size, 8)
        if size != 1:
            mark(x, 0)
        assert torch.equal(function(x), ((x + 1) * 4 + 1) * 6)
