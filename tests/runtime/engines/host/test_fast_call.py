"""What the host engine calls at replay is the op that was recorded, bit for bit."""

import functools

import pytest
import torch

from dsv4_compile.runtime.engines.host import (
    fast_call as host_public,
)
from dsv4_compile.runtime.engines.host import (
    launch as host_launch,
)
from dsv4_compile.runtime.engines.host import (
    out_variants as out_variants,
)
from dsv4_compile.runtime.engines.host.engine import HostEngine
from dsv4_compile.runtime.engines.host.fast_call import bind_fastest, is_same_call
from dsv4_compile.runtime.engines.host.out_variants import (
    OPS_WITH_OUT_VARIANT,
    ignores_autocast,
    out_names,
    out_variant,
)

ENGINE = HostEngine()
aten = torch.ops.aten


def floats(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def ints(*shape):
    return torch.randint(1, 5, shape, generator=torch.Generator().manual_seed(0))


X, Y, M, N, K, J = floats(3, 4), floats(4).abs(), floats(3, 5), floats(5, 4), ints(3, 4), ints(4)
POSITIVE, MASK, ROWS = X.abs() + 0.5, X > 0, torch.tensor([2, 0])
INDEX = torch.tensor([[0, 1, 2, 0], [2, 0, 1, 1], [1, 2, 0, 2]])
UNARY = """
    abs ceil cos cosh erf exp exp2 expm1 floor frac gelu hardsigmoid leaky_relu log log10 log1p log2 logical_not mish
    neg reciprocal round rsqrt sgn sigmoid sign silu sin sinh softplus sqrt tan tanh trunc
"""
BINARY = """
    add atan2 copysign div fmax fmin fmod floor_divide logaddexp maximum minimum mul nextafter pow remainder sub xlogy
    eq ge gt le lt ne logical_and logical_or logical_xor
"""
SAMPLES = {
    **{name: [(POSITIVE,), (POSITIVE.t(),)] for name in UNARY.split()},
    **{name: [(POSITIVE, Y), (POSITIVE, POSITIVE.t().contiguous().t())] for name in BINARY.split()},
    "_log_softmax": [(X, 1, False)],
    "_softmax": [(X, 0, False)],
    "addcdiv": [(X, POSITIVE, POSITIVE)],
    "addcmul": [(X, X, Y)],
    "addmm": [(X, M, N), (Y, M, N)],
    "addmv": [(floats(3), M, floats(5))],
    "all": [(MASK,), (MASK, 1)],
    "amax": [(X, [1])],
    "amin": [(X, [0], True)],
    "any": [(MASK,), (MASK, 0)],
    "arange": [(5,), (2, 9, 3)],
    "argmax": [(X, 1)],
    "argmin": [(X,)],
    "baddbmm": [(floats(2, 3, 3), floats(2, 3, 4), floats(2, 4, 3))],
    "bitwise_and": [(K, J), (MASK, MASK)],
    "bitwise_not": [(K,)],
    "bitwise_or": [(K, J)],
    "bitwise_xor": [(K, J)],
    "bmm": [(floats(2, 3, 4), floats(2, 4, 3))],
    "cat": [([X, X], 1), ([X.t(), X.t()],)],
    "clamp": [(X, -0.5, 0.5), (X, Y)],
    "clamp_max": [(X, 0.5)],
    "clamp_min": [(X, 0.0)],
    "cumprod": [(X, 1)],
    "cumsum": [(X, 0)],
    "elu": [(X,)],
    "gather": [(X, 0, INDEX)],
    "glu": [(X, 1)],
    "index": [(X, [ROWS]), (X, [None, ROWS]), (X, [ROWS, ROWS])],
    "index_add": [(X, 0, ROWS, X[:2])],
    "index_select": [(X, 0, ROWS), (X, 1, ROWS)],
    "lerp": [(X, POSITIVE, 0.25)],
    "max": [(X,), (X, 1), (X, POSITIVE)],
    "mean": [(X,), (X, [1], True)],
    "min": [(X,), (X, 0)],
    "mm": [(M, N), (N.t(), M.t())],
    "prod": [(X,), (X, 1)],
    "rand": [([3, 4],)],
    "randint": [(7, [3, 4]), (2, 7, [3])],
    "randn": [([40],)],
    "randperm": [(9,)],
    "scatter": [(X, 0, INDEX, POSITIVE), (X, 0, INDEX, 2.0)],
    "scatter_add": [(X, 0, INDEX, POSITIVE)],
    "scatter_reduce": [(X, 0, INDEX, POSITIVE, "amax")],
    "sort": [(X, 1)],
    "stack": [([X, X], 1), ([X.t(), X.t()],), ([Y, Y.double()], -1)],
    "sum": [(X,), (X, [0]), (K,)],
    "threshold": [(X, 0.1, 7.0)],
    "topk": [(X, 2), (X, 2, 0)],
    "tril": [(X,)],
    "triu": [(X, 1)],
    "where": [(MASK, X, Y), (MASK, X, X.double())],
}


def test_every_op_with_an_out_variant_has_a_sample():
    assert set(SAMPLES) == OPS_WITH_OUT_VARIANT


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_an_out_variant_computes_what_the_op_does(name):
    with_variant = 0
    for args in SAMPLES[name]:
        packet = getattr(aten, name)
        func = getattr(packet, torch._C._jit_resolve_packet(f"aten::{name}", *args))
        variant = out_variant(func)
        with_variant += variant is not None
        results = outputs_of(func, args)
        replayed = [torch.full_like(result, 99) for result in results]
        call = bind_fastest(variant, args, dict(zip(out_names(variant), replayed, strict=True)))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            assert ignores_autocast(func)
            call()
        for result, again in zip(results, replayed, strict=True):
            torch.testing.assert_close(again, result, rtol=0, atol=0, equal_nan=True)
    assert with_variant == len(SAMPLES[name])


def outputs_of(func, args):
    torch.manual_seed(1)
    results = func(*args)
    return list(results) if isinstance(results, tuple) else [results]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_variant_that_computes_something_else_is_not_used(monkeypatch):
    score, target, out = POSITIVE / 10, POSITIVE / 8, torch.zeros(())
    loss = functools.partial(torch.nn.functional.binary_cross_entropy, score, target)

    def difference():
        ENGINE.capture(lambda: out.copy_(loss()), ENGINE.make_pool(), name="the loss").replay()
        return (out - loss()).abs().item()

    assert difference() == 0
    monkeypatch.setattr(out_variants, "OPS_WITH_OUT_VARIANT", OPS_WITH_OUT_VARIANT | {"binary_cross_entropy"})
    monkeypatch.setattr(host_launch, "out_variant", out_variant.__wrapped__)  # past its cache
    assert difference() > 0.01


@pytest.mark.parametrize("name", ["add_", "addmm_", "baddbmm_", "index_put_", "copy_", "scatter_add_", "clamp_"])
def test_writing_in_place_ignores_autocast(name):
    batch = torch.eye(3).expand(2, 3, 3).clone()
    arguments = {
        "add_": (X.clone(), Y),
        "addmm_": (X.clone(), M, N),
        "baddbmm_": (batch, batch.clone(), batch.clone() / 3),
        "index_put_": (X.clone(), (ROWS,), POSITIVE[:2]),
        "copy_": (X.clone(), POSITIVE),
        "scatter_add_": (X.clone(), 0, INDEX, POSITIVE),
        "clamp_": (X.clone(), -0.3, 0.3),
    }[name]
    expected = getattr(arguments[0].clone(), name)(*arguments[1:])
    with torch.autocast("cpu", torch.bfloat16):
        getattr(arguments[0], name)(*arguments[1:])
    assert torch.equal(arguments[0], expected)
    assert all(ignores_autocast(getattr(getattr(aten, name), kind)) for kind in getattr(aten, name).overloads()[:1])


def test_public_functions_are_bound_where_they_are_the_same_call():
    out = torch.empty(3, 4)
    for call in (
        bind_fastest(aten.mm.out, (M, N), {"out": out}),
        bind_fastest(aten.add.out, (X, 2), {"alpha": 3, "out": out}),
        bind_fastest(aten.silu.out, (X,), {"out": out}),
        bind_fastest(aten.copy_.default, (out, X), {}),
        bind_fastest(aten.relu.default, (X,), {}),
    ):
        assert type(call.func).__name__ == "builtin_function_or_method"


@pytest.mark.parametrize(
    ("public", "op"),
    [
        (lambda: torch.mul(X, 2), lambda: aten.mul.Scalar(X, 2)),
        (lambda: torch.add(X, 2), lambda: aten.add.Tensor(X, 2.0)),
        (lambda: torch.add(X, 1), lambda: aten.add.Tensor(X, True)),
        (lambda: torch.add(X, X.clone()), lambda: aten.add.Tensor(X, X)),
        (lambda: torch.sum(X, 0), lambda: aten.sum.default(X)),
        (lambda: torch.relu(X, out=X), lambda: aten.relu.default(X)),
        (lambda: None, lambda: aten.relu.default(X)),
    ],
)
def test_another_call_is_told_apart(public, op):
    assert not is_same_call(public, op)
    assert is_same_call(op, op)


def test_without_the_dry_run_a_wrong_function_is_bound(monkeypatch):
    out = torch.zeros(())
    run = lambda: out.copy_(X.sum())  # noqa: E731
    ENGINE.capture(run, ENGINE.make_pool(), name="sum").replay()
    assert out == X.sum()
    monkeypatch.setattr(host_public, "is_same_call", lambda one, other: True)
    with pytest.raises(TypeError, match="sum"):
        ENGINE.capture(run, ENGINE.make_pool(), name="sum").replay()


def test_a_default_device_of_the_caller_does_not_get_into_a_replay():
    out = torch.zeros(3)
    graph = ENGINE.capture(lambda: out.copy_(torch.ones(3) + torch.full((3,), 2.0)), ENGINE.make_pool(), name="made")
    with torch.device("meta"):
        graph.replay()
    assert out.tolist() == [3, 3, 3]
