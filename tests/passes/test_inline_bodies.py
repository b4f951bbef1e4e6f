"""Bodies of wrappers are put in the place of their calls, so that split ops in them are seen."""

from __future__ import annotations

import pytest
import torch
from eager_twin import check_calls
from torch.utils.checkpoint import checkpoint
from toy_ops import SPLIT

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.inspect.plan import Plan

toy = torch.ops.toy
OPTIONS = [{}, {"region": "minimal", "runner": "mrv1"}, {"engine": "off"}]


@torch.compiler.nested_compile_region
def layer(x, w):
    y = torch.sin(x @ w) * 2
    out = torch.empty_like(y)
    toy.attn(y, out)
    return out + 1, y


def called_twice(x, w):
    a, b = layer(x, w)
    c, d = layer(a, w)
    return c + d + b


def called_for_two_sizes(x, w):
    a, b = layer(x, w)
    c, d = layer(torch.cat([x, x[:1]]), w)
    return a + b, c + d


def checkpointed(x, w):
    def body(h, *, scale):
        y = h @ w
        out = torch.empty_like(y)
        toy.attn(y, out)
        return out.sin() * scale, y

    a, b = checkpoint(body, x, use_reentrant=False, scale=3.0)
    return a + b


def nested(x, w):
    def body(h):
        chosen = torch.cond(h.sum() > 0, lambda q: q + 1, lambda q: q - 1, (h,))
        return layer(h, w)[0] + chosen + torch.vmap(lambda row: row.sin())(h)

    return checkpoint(body, x, use_reentrant=False) * 2


def with_a_constant(x, w):
    table = torch.tensor([1.0, 2.0, 3.0])

    def body(h):
        return toy.fresh(h * table.sum()) + torch.tensor(2.0)

    return checkpoint(body, x, use_reentrant=False) @ w


def without_results(x, w):
    checkpoint(lambda h: x.add_(toy.fresh(h)), x @ w, use_reentrant=False)
    return x + 1


def identity(x, w):
    return checkpoint(lambda h: h, x, use_reentrant=False) * 2, checkpoint(lambda h: (h, h + 1), w, use_reentrant=False)


def under_no_grad(x, w):
    def body(h):
        with torch.no_grad():
            return toy.fresh(h @ w)

    return checkpoint(body, x, use_reentrant=False) + 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "program",
    [called_twice, called_for_two_sizes, checkpointed, nested, with_a_constant, identity, under_no_grad],
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results(program, options):
    weight = torch.randn(4, 4)
    check_calls(program, [(torch.randn(n, 4), weight) for n in (5, 5, 5, 6, 6, 5)], split_ops=SPLIT, **options)


def plan_of(program) -> Plan:
    return dsv4_compile.explain(program, torch.randn(5, 4), torch.randn(4, 4), options={"split_ops": SPLIT})


@pytest.mark.parametrize("program", [called_twice, called_for_two_sizes, checkpointed])
def test_only_the_split_op_is_eager(program):
    eager = [(op.op, op.reason) for unit in plan_of(program).regions for op in unit.ops]
    assert set(eager) == {("toy::attn", "split op")}


def test_a_body_that_is_called_twice_is_captured_twice():
    plan = plan_of(called_twice)
    assert [unit.kind for unit in plan.units] == ["piece", "region", "piece", "region", "piece"]


def test_layers_of_one_body_share_their_code():
    def three_layers(x, w):
        for _ in range(4):
            x, _ = layer(x, w)
        return x

    assert [unit.duplicate_of for unit in plan_of(three_layers).pieces] == [None, None, "piece_1", "piece_1", None]


def test_lines_and_names_are_those_of_the_body():
    ops = [op for unit in plan_of(checkpointed).units for op in unit.ops]
    assert "out.sin() * scale" in next(op.line for op in ops if op.op == "sin")
    assert [op.node for op in ops][:2] == ["y", "attn"]


def test_a_branch_is_left_to_the_host():
    reasons = {op.op: op.reason for unit in plan_of(nested).regions for op in unit.ops}
    assert reasons == {"toy::attn": "split op", "cond": "higher-order op cond decides on the host what it runs"}


def test_no_call_runs_a_body_twice():
    check_calls(without_results, [(torch.ones(3, 4), torch.ones(4, 4))] * 4, split_ops=SPLIT)
    assert counters.uncaptured_calls == 1
