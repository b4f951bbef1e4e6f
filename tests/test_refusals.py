"""What cannot be right is refused by name: readers of step state in disguise, transforms, training inside, lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import odd_ops  # noqa: F401
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile.config import Config
from dsv4_compile.errors import (
    AliasingOpError,
    Dsv4Error,
    HazardError,
    OptionError,
    TrainingError,
    UnsupportedInputError,
    UnsupportedTransformError,
)

toy, odd = torch.ops.toy, torch.ops.odd


@pytest.fixture(autouse=True)
def _step_ops() -> None:
    dsv4_compile.register_op("toy::kv_write", role="prepare", step_state=("slots",))
    dsv4_compile.register_op("toy::context_write", role="prepare", reads_context=True)
    dsv4_compile.register_op("odd::context_add", role="prepare", reads_context=True)


def sliced(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    toy.kv_write(x, slots[:5].view(-1), cache)


def converted(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    toy.kv_write(x, slots.int().long(), cache)


def computed(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    toy.kv_write(x, slots + 1, cache)


def copied(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    toy.kv_write(x, torch.empty_like(slots).copy_(slots), cache)


def in_a_checkpoint(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    checkpoint(toy.kv_write, x, slots, cache, use_reentrant=False)


def from_the_context(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    toy.context_write(x, cache)


def by_a_composite_op(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    odd.context_add(x, cache)


READERS = (sliced, converted, computed, copied, in_a_checkpoint, from_the_context, by_a_composite_op)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_reader_of_step_state_is_found_in_every_disguise(reader: Callable[..., Any]) -> None:
    def fn(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        reader(x, slots, cache)
        return toy.fresh(x)

    def plan(region: str) -> Any:
        arguments = (torch.randn(5, 4), torch.arange(5), torch.zeros(8, 4))
        options = {"split_ops": SPLIT, "runner": "mrv1", "region": region}
        return dsv4_compile.explain(fn, *arguments, options=options)

    with pytest.raises(HazardError, match=r"(reads the step (state|context)).*but it would be captured under mrv1"):
        plan("narrow")
    for region in ("wide", "minimal"):
        eager = [op.op for unit in plan(region).regions for op in unit.ops]
        assert any("write" in op or "context" in op or "checkpoint" in op for op in eager), eager


COMPOSITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "aten::linear": lambda x, w: torch.nn.functional.linear(x * 2, w) + 1,
    "aten::matmul": lambda x, w: (x * 2) @ w + 1,
    "aten::softmax.int": lambda x, w: torch.softmax(x * 2, -1) + 1,
    "aten::layer_norm": lambda x, w: torch.nn.functional.layer_norm(x * 2, (4,)) + 1,
    "aten::scaled_dot_product_attention": lambda x, w: (
        torch.nn.functional.scaled_dot_product_attention(x[None] * 2, w[None], w[None]) + 1
    ),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_split_op_that_torch_makes_of_others_is_found(name: str) -> None:
    """Else it would be captured, as a misspelt one would."""
    model = COMPOSITES[name]
    x, w = torch.randn(5, 4), torch.randn(4, 4)
    plan = dsv4_compile.explain(model, x, w, options={"split_ops": [name]})
    assert [unit.kind for unit in plan.units] == ["piece", "region", "piece"]
    assert plan.notes == ()
    split = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options={"split_ops": [name]})
    with torch.no_grad(), dsv4_compile.counters.expect(captures=1, replays=2):
        for _ in range(3):
            assert torch.equal(split(x, w), model(x, w))


def test_a_composite_op_that_reads_computed_step_state_is_found() -> None:
    """Its parts show a read of a value that the graph made; that it is step state, the op's own argument says."""
    dsv4_compile.register_op("odd::scaled_insert", role="prepare", step_state=("slots",))

    def fn(x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        odd.scaled_insert(x, slots + 1, cache)
        return toy.fresh(x)

    arguments = (torch.randn(5, 4), torch.ones(5, 1), torch.zeros(5, 4))
    with pytest.raises(HazardError, match=r"odd::scaled_insert\.default reads the step state slots"):
        dsv4_compile.explain(fn, *arguments, options={"split_ops": SPLIT, "runner": "mrv1", "region": "narrow"})


def test_a_split_op_in_a_branch_is_no_uncalled_one() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(y.sum() > 0, lambda x: toy.fresh(x), lambda x: x * 2, (x,))

    plan = dsv4_compile.explain(fn, torch.ones(5, 4), torch.ones(2), options={"split_ops": ["toy::fresh"]})
    assert [op.reason for region in plan.regions for op in region.ops] == [
        "runs the split op toy::fresh.default inside"
    ]
    assert plan.notes == ()


def test_sizes_that_no_tensor_gives_are_said_to_mean_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A graph whose only tensor is a scalar has no token count to list sizes of."""
    for options in ({}, {"capture_sizes": [8]}, {"max_tokens": 8}):
        torch._dynamo.reset()
        caplog.clear()
        compiled(lambda x: toy.fresh(x + 1), **options)(torch.tensor(1.0))
        said = [record.getMessage() for record in caplog.records if "mean nothing" in record.getMessage()]
        assert len(said) == bool(options)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="dsv4_piecewise", dynamic=True, options={"split_ops": SPLIT, **options})


def refuses(fn: Callable[..., Any], error: type[Dsv4Error], message: str) -> None:
    """Compiled, with and without `fullgraph`: no graph break may hide the error."""
    for fullgraph in (True, False):
        torch._dynamo.reset()
        refused = torch.compile(
            fn, backend="dsv4_piecewise", dynamic=True, fullgraph=fullgraph, options={"split_ops": SPLIT}
        )
        with torch.no_grad(), pytest.raises(error, match=message):
            refused(torch.randn(5, 4), torch.randn(5, 4))


def test_transforms_of_functions() -> None:
    refuses(
        lambda x, y: torch.func.grad(lambda z: (z * z).sum())(toy.fresh(x)),
        UnsupportedTransformError,
        "torch.func.grad, vjp, jacrev or hessian is called",
    )


def test_shape_of_the_callers_tensor_changed_in_place() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        same = x.add_(1)  # Dynamo itself breaks the graph at x.t_()
        same.t_()
        return toy.fresh(y)

    refuses(fn, UnsupportedInputError, r"t_\(\) changes the shape of the caller's own tensor in place")


def test_op_that_returns_its_buffer_inside_of_a_checkpoint() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(toy.liar, x, y, use_reentrant=False)

    refuses(fn, AliasingOpError, "op toy::liar.default returns memory of its argument 'buf'")


def test_grad_enabled_inside() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))

    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return toy.fresh(x @ weight)

    with torch.no_grad(), pytest.raises(TrainingError, match="weight requires grad"):
        compiled(fn)(torch.randn(5, 4))


@pytest.mark.parametrize("region", ["narrow", "wide", "minimal"])
def test_a_split_op_runs_eagerly_even_if_it_only_makes_a_view(region: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        head = odd.head_of(h, 2)
        g = toy.fresh(h)
        head.add_(g[:2])
        return toy.fresh(h), head

    options = {"split_ops": (*SPLIT, "odd::head_of"), "region": region}
    plan = dsv4_compile.explain(fn, torch.randn(5, 4), options=options)
    assert [op.op for unit in plan.regions for op in unit.ops].count("odd::head_of") == 1
    assert not any(op.op == "odd::head_of" for unit in plan.pieces for op in unit.ops)


def test_a_split_op_that_torch_takes_apart_is_one() -> None:
    plan = dsv4_compile.explain(
        lambda x: odd.double(x + 1) + 1, torch.randn(5, 4), options={"split_ops": ["odd::double"]}
    )
    assert [[op.op for op in unit.ops] for unit in plan.units] == [["add"], ["odd::double"], ["add"]]
    assert not any("never calls" in note for note in plan.notes)


def test_sizes_above_the_bound_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"capture_sizes has 16, above max_tokens=8: raise max_tokens or leave it out"
    ):
        Config.from_options({"capture_sizes": [4, 16, 8], "max_tokens": 8})
    assert Config.from_options({"capture_sizes": [4, 8], "max_tokens": 8}).token_bound == 8
