"""An op that no graph can hold, as only its capture shows, becomes eager: counted, said once, and the call goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_helpers import rows
from runtime_helpers import compile_host, the_owner
from torch import Tensor, nn
from torch.library import Library

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import CaptureError

LIBRARY = Library("refused", "FRAGMENT")
CALLS: list[str] = []


def item(x: Tensor) -> Tensor:
    return x * x.sum().item()


def listed(x: Tensor) -> Tensor:
    return x * x.sum(0).tolist()[0]


def as_array(x: Tensor) -> Tensor:
    return x * float(x.detach().numpy().sum())


def branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def size_of_data(x: Tensor) -> Tensor:
    return x * len(x.nonzero())


def mask(x: Tensor) -> Tensor:
    return x * x[x > 0].sum()


def moves_a_tensor(x: Tensor) -> Tensor:
    y = x + 1
    y.data = x * 2
    return y + 1


def noted(x: Tensor) -> Tensor:
    CALLS.append("noted")
    return x + 1


def fill(x: Tensor, cache: Tensor) -> None:
    cache[: len(x)].add_(x)


BODIES: list[Callable[[Tensor], Tensor]] = [item, listed, as_array, branch, size_of_data, mask, moves_a_tensor]
for body in (*BODIES, noted):
    for key in ("CPU", "CompositeExplicitAutograd"):
        op = f"{body.__name__}_{key}"
        LIBRARY.define(f"{op}(Tensor x) -> Tensor")
        LIBRARY.impl(op, body, key)
        torch.library.register_fake(f"refused::{op}", torch.empty_like, lib=LIBRARY)
LIBRARY.define("fill(Tensor x, Tensor(a!) cache) -> ()")
LIBRARY.impl("fill", fill, "CompositeExplicitAutograd")
torch.library.register_fake("refused::fill", lambda x, cache: None, lib=LIBRARY)

refused, toy = torch.ops.refused, torch.ops.toy


def agree(compiled: Any, function: Callable[..., Tensor], n: int = 5, times: int = 1) -> None:
    with torch.no_grad():
        for _ in range(times):
            x = rows(n)
            assert torch.equal(compiled(x), function(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
@pytest.mark.parametrize("name", [body.__name__ for body in BODIES])
def test_the_second_call_makes_it_eager_and_goes_on(name: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    op = getattr(refused, f"{name}_{key}")

    def function(x: Tensor) -> Tensor:
        return op(x + 1) * 2 + op(x - 1)

    compiled = compile_host(function)
    with counters.expect(replans=0, uncaptured_calls=1):
        agree(compiled, function)
    with counters.expect(replans=1, uncaptured_calls=1, captures=0, replays=0):
        agree(compiled, function)
    with counters.expect(replans=0, uncaptured_calls=1, captures=1, replays=3):
        agree(compiled, function, times=4)
    with counters.expect(replans=0, captures=1, uncaptured_calls=1, replays=2):
        agree(compiled, function, n=6, times=3)
    said = [r.getMessage() for r in caplog.records if "runs eagerly from now on" in r.getMessage()]
    assert len(said) == 1  # for both calls of the op
    assert said[0].startswith(f"refused::{name}_{key}.default runs eagerly from now on, since no graph can hold it: ")
    assert "as its capture showed" in said[0]
    assert "test_refused_captures.py:" in said[0]


OPTIONS: list[Any] = [
    {},
    {"runner": "mrv1", "region": "minimal"},
    {"runner": "mrv1", "region": "wide"},
    {"check": "full", "static_outputs": True, "pool": "bucket"},
    {"max_tokens": 16, "aux_streams": 2},
    {"piece_compiler": "aot_eager"},
    pytest.param({"piece_compiler": "inductor", "aux_streams": 2}, marks=pytest.mark.inductor),
]


class Model(nn.Module):
    """Layers alike, each with an op that may not be captured, one that must be eager, and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            h = (x @ self.w).tanh()
            refused.fill(h, self.cache)
            h = refused.branch_CPU(h) + refused.mask_CPU(h)
            x = toy.fresh(h) + self.cache[: len(x)]
        return x


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_call_has_its_effects_once(options: dict[str, Any]) -> None:
    model, eager = Model().double(), Model().double()  # what Inductor rounds otherwise adds up over the loop
    eager.load_state_dict(model.state_dict())
    compiled = compile_host(model, **options)
    with torch.no_grad(), counters.expect(graphs_compiled=1):
        for n in (5, 5, 5, 5, 5, 7, 7, 7, 5):
            x = rows(n).double()
            torch.testing.assert_close(compiled(x).clone(), eager(x))
            torch.testing.assert_close(model.cache, eager.cache)
            model.cache.copy_(eager.cache)
    assert 1 <= counters.replans <= 2  # two ops, which the captures of one call may show one after another
    assert counters.captures == 2


def test_random_numbers_are_those_of_eager() -> None:
    def function(x: Tensor) -> Tensor:
        h = x + torch.rand_like(x)
        return refused.branch_CPU(h) + torch.rand_like(x)

    compiled = compile_host(function)
    for seed in range(5):
        x = rows(5)
        torch.manual_seed(seed)
        wanted, state = function(x), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(compiled(x), wanted)
        assert torch.equal(torch.get_rng_state(), state)


def test_other_ops_of_its_piece_stay_captured() -> None:
    def function(x: Tensor) -> Tensor:
        return refused.branch_CPU(refused.noted_CPU(x).exp()).exp() + 1

    compiled = compile_host(function)
    agree(compiled, function, times=4)
    CALLS.clear()
    x = rows(5)
    with torch.no_grad():
        compiled(x)
    assert CALLS == []  # its Python is frozen in a piece
    kinds = [(unit.kind, len(unit.nodes)) for unit in the_owner()._graph.units]
    assert [kind for kind, _ in kinds] == ["piece", "region", "piece"]


def test_an_op_that_is_to_be_captured_is_refused_for_ever() -> None:
    dsv4_compile.register_op("refused::branch_CPU", role="capture")
    compiled = compile_host(lambda x: refused.branch_CPU(x + 1) * 2)
    with torch.no_grad():
        compiled(rows(5))
        for _ in range(3):
            with pytest.raises(CaptureError, match="piece_0"), counters.expect(captures=0, replans=0):
                compiled(rows(5))


def test_capture_ahead_of_serving_is_complete() -> None:
    def function(x: Tensor) -> Tensor:
        return refused.branch_CPU(x + 1) * 2

    compiled = compile_host(function)
    dsv4_compile.capture(compiled, lambda n: (rows(n),), [5, 6, 7], progress=False)
    with counters.expect(captures=0, uncaptured_calls=0, replans=0):
        for n in (7, 6, 5):
            agree(compiled, function, n)


def test_a_dump_shows_the_plan_that_is_in_force(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return refused.branch_CPU(x + 1) * 2

    compiled = compile_host(function, dump_dir=str(tmp_path))
    plan = tmp_path / "graph_0" / "plan.json"
    agree(compiled, function)
    assert [unit["kind"] for unit in json.loads(plan.read_text())["units"]] == ["piece"]
    agree(compiled, function, times=3)
    units = json.loads(plan.read_text())["units"]
    assert [unit["kind"] for unit in units] == ["piece", "region", "piece"]
    assert units[1]["ops"][0]["reason"].endswith(", as its capture showed")


def test_instances_of_one_class_are_planned_again_together() -> None:
    models = [Model(), Model()]
    compiled = [compile_host(model) for model in models]
    with torch.no_grad(), counters.expect(graphs_compiled=1):
        for _ in range(5):
            for function, model in zip(compiled, models, strict=True):
                x, eager = rows(5), Model()
                eager.load_state_dict(model.state_dict())
                torch.testing.assert_close(function(x), eager(x))
    assert counters.captures == 2
