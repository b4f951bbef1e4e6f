"""Where pieces are cut for the piece compiler, and which parts are the same."""

from __future__ import annotations

from typing import Any

import pytest
import runtime_helpers  # noqa: F401  (it defines the `probe` ops)
import torch
from expecttest import assert_expected_inline
from layer_plans import layer_plan
from torch import Tensor, nn
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile.inspect.plan import Plan

COMPILED = {"split_ops": SPLIT, "piece_compiler": "aot_eager", "engine": "host"}


def parts_text(plan: Plan) -> str:
    """The lines about parts, under the names of their pieces."""
    lines = [line for line in str(plan).splitlines() if "piece compiler" in line]
    for unit in plan.pieces:
        lines.append(unit.name if unit.duplicate_of is None else f"{unit.name}, a copy of {unit.duplicate_of}")
        for part in unit.subgraphs:
            fate = part.uncompiled or "compiled"
            lines.append(
                f"    {part.name}: {part.nodes} ops, {fate}{f', as {part.duplicate_of}' if part.duplicate_of else ''}"
            )
    return "\n".join(lines)


def explain(function: Any, *args: Tensor, **options: Any) -> Plan:
    return dsv4_compile.explain(function, *args, options={**COMPILED, **options})


def test_a_c4a_layer_is_cut_at_its_custom_ops() -> None:
    assert_expected_inline(
        parts_text(layer_plan(4, "narrow", piece_compiler="inductor")),
        """\
piece compiler inductor: 4 subgraphs compiled (4 different), 4 left alone
piece_0
    piece_0.0: 4 ops, compiled
    piece_0.1: 1 ops, calls dsv4::fused_q_kv_rmsnorm
    piece_0.2: 1 ops, compiled
    piece_0.3: 2 ops, calls dsv4::qnorm_rope_kv_insert
    piece_0.4: 1 ops, compiled
    piece_0.5: 2 ops, calls dsv4::indexer_q_rope
piece_1
    piece_1.0: 1 ops, calls dsv4::inverse_rope
    piece_1.1: 3 ops, compiled""",
    )


def test_without_a_compiler_nothing_is_cut() -> None:
    assert not any(unit.subgraphs for unit in layer_plan(4, "narrow", piece_compiler="eager").units)


def test_an_op_that_allocates_for_others_belongs_to_no_part() -> None:
    """`out` is filled by one part and read by the next, so it is made outside of both."""

    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.probe.core(x * 2, out)
        return out + 1

    assert_expected_inline(
        parts_text(explain(model, torch.zeros(5, 4))),
        """\
piece compiler aot_eager: 2 subgraphs compiled (2 different), 1 left alone
piece_0
    piece_0.0: 1 ops, compiled
    piece_0.1: 1 ops, calls probe::core
    piece_0.2: 1 ops, compiled""",
    )


def test_inputs_that_share_memory() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    memory = torch.zeros(9, 4)
    assert_expected_inline(
        parts_text(explain(model, memory[1:], memory[:8])),
        """\
piece compiler aot_eager: 0 subgraphs compiled (0 different), 1 left alone
piece_0
    piece_0.0: 2 ops, l_x_ and l_y_ may share memory, and it writes one of them""",
    )


def test_an_input_seen_around_its_edges() -> None:
    buffer = torch.zeros(8, 4)
    torch._dynamo.mark_static_address(buffer)

    def model(x: Tensor) -> Tensor:
        return x + buffer.as_strided((4,), (1,), 2)

    assert_expected_inline(
        parts_text(explain(model, torch.zeros(5, 4))),
        """\
piece compiler aot_eager: 0 subgraphs compiled (0 different), 1 left alone
piece_0
    piece_0.0: 1 ops, as_strided may show memory around what it is a view of""",
    )


class Scaled(nn.Module):
    """A float attribute, which Dynamo makes an input of the graph."""

    def __init__(self, scale: float, cache: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = scale
        self.register_buffer("cache", cache)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.toy.fresh(self.linear(x) * self.scale + self.cache).sin()


@pytest.mark.parametrize(("scales", "copies"), [((0.5, 0.5, 0.5, 0.5), 2), ((0.5, 0.5, 0.25, 0.5), 1)])
def test_layers_with_equal_floats_and_slices_of_one_cache_are_the_same(scales: tuple[float, ...], copies: int) -> None:
    """The pieces between layers: each has a float of its own, and a slice of a cache that all layers share."""
    cache = torch.zeros(len(scales), 4)
    model = nn.Sequential(*(Scaled(scale, rows) for scale, rows in zip(scales, cache, strict=True)))
    plan = explain(model, torch.zeros(5, 4))
    assert sum(unit.duplicate_of is not None for unit in plan.pieces) == copies


def conjugated() -> Tensor:
    return torch.randn(4, 4, dtype=torch.complex64).conj()


LAZY = {
    "conjugated": (conjugated, lambda z: z.real.contiguous() * 2),
    "negated": (lambda: conjugated().imag, lambda z: z.exp() + 1),
    "negated and written": (lambda: conjugated().imag, lambda z: z.add_(1).clone()),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_part_that_takes_what_is_conjugated_when_read_is_left_alone(compiler: str, name: str) -> None:
    make, function = LAZY[name]
    plan = explain(function, make(), piece_compiler=compiler)
    assert any("conjugated or negated when it is read" in str(part.uncompiled) for part in plan.pieces[0].subgraphs)
    options = {**COMPILED, "piece_compiler": compiler}
    compiled = torch.compile(function, backend="dsv4_piecewise", dynamic=True, options=options)
    with torch.no_grad():
        for _ in range(4):
            given = make()
            expected = function(given.clone())
            torch.testing.assert_close(compiled(given), expected)
