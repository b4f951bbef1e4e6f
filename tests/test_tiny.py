"""The contract on one page: read this first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile.errors import HazardError, OptionError, TrainingError

OPTIONS = {"split_ops": SPLIT, "engine": "off"}


def layer(x: Tensor, w: Tensor) -> Tensor:
    q = x @ w
    out = torch.empty_like(q)
    torch.ops.toy.attn(q, out)
    return out + 1


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 4), torch.randn(4, 4)


def test_the_backend_is_found_by_name_and_equals_eager(inputs: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=OPTIONS)
    for n in (5, 8, 3):
        x = torch.randn(n, 4)
        assert torch.equal(compiled(x, inputs[1]), layer(x, inputs[1]))


def test_one_split_op_gives_two_pieces_and_a_region(inputs: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=OPTIONS)
    with dsv4_compile.counters.expect(
        graphs_compiled=1, pieces_compiled=2, regions=1, uncaptured_calls=3, eager_op_calls=3
    ):
        for n in (5, 8, 3):
            compiled(torch.randn(n, 4), inputs[1])


def test_explain_shows_the_plan_and_runs_nothing(inputs: tuple[Tensor, Tensor]) -> None:
    with dsv4_compile.counters.expect(graphs_compiled=0, uncaptured_calls=0):
        plan = dsv4_compile.explain(layer, *inputs, options=OPTIONS)
    assert [unit.name for unit in plan.units] == ["piece_0", "region_0", "piece_1"]
    assert [op.reason for op in plan.regions[0].ops] == ["split op"]


def test_a_wrong_option_is_refused_by_name(inputs: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(layer, backend="dsv4_piecewise", options={"runer": "mrv1"})
    with pytest.raises(OptionError, match="unknown option 'runer': did you mean 'runner'"):
        compiled(*inputs)


def test_training_is_refused(inputs: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(layer, backend="dsv4_piecewise", options=OPTIONS)
    with pytest.raises(TrainingError, match="w requires grad"):
        compiled(inputs[0], inputs[1].requires_grad_())


def test_the_old_runner_refuses_a_captured_reader_of_step_state(inputs: tuple[Tensor, Tensor]) -> None:
    dsv4_compile.register_op("toy::kv_write", role="prepare", step_state=("slots",))

    def model(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        torch.ops.toy.kv_write(x, slots, cache)
        return torch.ops.toy.fresh(x)

    arguments = (inputs[0], torch.arange(5), torch.zeros(8, 4))
    for region in ("wide", "minimal"):
        plan = dsv4_compile.explain(model, *arguments, options={**OPTIONS, "runner": "mrv1", "region": region})
        assert plan.pieces == ()
    with pytest.raises(HazardError, match=r"op toy::kv_write\.default reads the step state slots through its argument"):
        dsv4_compile.explain(model, *arguments, options={**OPTIONS, "runner": "mrv1", "region": "narrow"})
