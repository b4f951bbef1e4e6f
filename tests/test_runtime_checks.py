"""What a program checks while it runs (`torch._check`, asserts on tensors) is checked in every call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from eager_twin import compile_piecewise, outcome, plain_assert, unbacked
from torch._subclasses import FakeTensorMode
from toy_ops import SPLIT, Host

import dsv4_compile
from dsv4_compile import counters

toy = torch.ops.toy
pytestmark = pytest.mark.filterwarnings("ignore:_check_is_size:FutureWarning")
PATHS = [{}, {"engine": "off"}, {"region": "minimal", "runner": "mrv1"}, {"check": "full"}, {"capture_sizes": [99]}]


@pytest.fixture(autouse=True)
def scalars_of_data() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def check_number(x, y):
    n = x.sum().item()
    torch._check(n < 5)
    return y * n


def check_with_message(x, y):
    n = x.sum().item()
    torch._check(n < 5, lambda: "too many")
    return y + 1


def check_value(x, y):
    n = x.sum().item()
    torch._check_value(n < 5)
    return y + 1


def check_is_size(x, y):
    n = x.sum().item()
    torch._check_is_size(n, max=4)
    return y + 1


def check_tensor(x, y):
    torch._check_tensor_all(x < 5)
    return y + 1


def constrain_range(x, y):
    torch.sym_constrain_range_for_size(x.sum().item(), min=0, max=4)
    return y + 1


def constrain_op(x, y):
    torch.ops.aten.sym_constrain_range(x.sum().item(), min=0, max=4)
    return y + 1


def assert_scalar(x, y):
    torch.ops.aten._assert_scalar(x.sum().item() < 5, "too many")
    return y + 1


def assert_async(x, y):
    torch._assert_async((x < 5).all())
    return y * x.sum()


def assert_async_message(x, y):
    z = y + 1
    torch._assert_async((x < 5).all(), "too many")
    return z


def functional_assert(x, y):
    torch.ops.aten._functional_assert_async.msg((x < 5).all(), "too many", torch.empty(0))
    return y + 1


CHECKS = [
    check_number,
    check_with_message,
    check_value,
    check_is_size,
    check_tensor,
    constrain_range,
    constrain_op,
    assert_scalar,
    assert_async,
    assert_async_message,
    functional_assert,
    plain_assert,
]


def assert_as_traced(function, **options):
    """Good and bad calls in turn: each gives, or raises, what the traced graph does, bad ones leave nothing behind."""
    compiled = compile_piecewise(function, **options)
    traced = torch.compile(function, backend="eager", dynamic=True, fullgraph=True)
    for value in (1, 1, 1, 9, 1, 9, 9, 2):
        args = (torch.tensor([value]), torch.ones(3))
        if value < 5:
            assert torch.equal(outcome(compiled, args)[0], outcome(function, args)[0])
            continue
        with pytest.raises(RuntimeError) as wanted:
            outcome(traced, args)
        with pytest.raises(RuntimeError) as given:
            outcome(compiled, args)
        assert (type(given.value), str(given.value)) == (type(wanted.value), str(wanted.value))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("function", CHECKS)
@pytest.mark.parametrize("options", PATHS, ids=str)
def test_a_check_holds_in_every_path(function, options):
    assert_as_traced(function, **options)


@pytest.mark.inductor
@pytest.mark.parametrize("function", [check_number, assert_async_message, functional_assert, plain_assert])
@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_a_check_holds_beside_compiled_code(function, compiler):
    assert_as_traced(function, piece_compiler=compiler)


@pytest.mark.parametrize("first", [9, 1])
def test_the_first_call_may_fail(first):
    compiled = compile_piecewise(check_number)
    for value in (first, 1, 1, 1):
        args = (torch.tensor([value]), torch.ones(3))
        if value > 5:
            with pytest.raises(RuntimeError, match="u0"):
                outcome(compiled, args)
        else:
            assert torch.equal(outcome(compiled, args)[0], torch.ones(3))


@pytest.mark.parametrize("check", [check_number, assert_async_message])
@pytest.mark.parametrize("region", ["narrow", "minimal"])
def test_nothing_after_a_check_happens_if_it_fails(check, region):
    def f(x, y, cache):
        toy.attn(y, cache)
        z = check(x, y)
        cache.add_(1)
        return toy.fresh(z) + cache

    compiled = compile_piecewise(f, region=region, split_ops=SPLIT)
    for value in (1, 1, 1, 9, 1):
        cache = torch.zeros(3)
        args = (torch.tensor([value]), torch.ones(3), cache)
        with torch.no_grad():
            if value > 5:
                with pytest.raises(RuntimeError):
                    compiled(*args)
            else:
                compiled(*args)
        eager = torch.zeros(3)
        toy.attn(torch.ones(3), eager)
        assert torch.equal(cache, eager if value > 5 else eager + 1)


def test_a_check_is_made_by_a_call_inside_of_another():
    compiled = compile_piecewise(check_number)

    def outer(x, y):
        out = torch.empty_like(y)
        toy.hook(y, out)
        return out + x

    served = compile_piecewise(outer, split_ops=SPLIT)
    Host.function = staticmethod(lambda q: compiled(torch.tensor([9]), q))
    try:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="u0"):
                served(torch.ones(3), torch.ones(3))
    finally:
        Host.function = staticmethod(lambda q: 2 * q)


def test_a_check_of_sizes_splits_no_piece_and_costs_a_replay_nothing():
    def f(x):
        y = x * 3
        torch._check(x.shape[0] < 6)
        return y + 1

    plan = dsv4_compile.explain(f, unbacked(4, 2))
    assert [(unit.kind, [op.name for op in unit.ops]) for unit in plan.units] == [("piece", ["mul", "add"])]
    compiled = compile_piecewise(f)
    with counters.expect(eager_op_calls=0, captures=1, traced_graph_calls=0):
        for _ in range(4):
            outcome(compiled, (unbacked(4, 2),))


def test_reasons_say_what_is_checked():
    plan = dsv4_compile.explain(check_with_message, torch.tensor([1]), torch.ones(3))
    reasons = [op.reason for unit in plan.regions for op in unit.ops if "assert_scalar" in op.op]
    assert set(reasons) == {"checks a number on the host"}


def test_on_a_device_data_is_checked_outside_of_graphs():
    from dsv4_compile.analysis.effects import EffectsRecorder, Storages

    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten._assert_async.msg)
    recorder = EffectsRecorder({}, Storages())
    for device, reason in (("cpu", None), ("cuda", "aten::_assert_async.msg checks data, which is safer outside")):
        with FakeTensorMode(), recorder.node(node) as found:
            torch.ops.aten._assert_async.msg(torch.empty((), dtype=torch.bool, device=device), "too many")
        assert found.effects(None).uncapturable == reason
        assert found.effects(None).barrier == "aten::_assert_async.msg checks data"
