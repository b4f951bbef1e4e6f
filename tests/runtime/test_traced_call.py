"""A call that breaks an assumption of the plan runs the traced graph itself: nothing moved, compiled or captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from program_oracle import clone_all
from torch import Tensor
from torch.autograd import forward_ad
from toy_ops import LOG, SPLIT

import dsv4_compile
from dsv4_compile import counters

toy = torch.ops.toy
PLANS = [
    (runner, region, engine)
    for runner, region in (("mrv1", "minimal"), ("mrv1", "wide"), ("mrv2", "narrow"), ("mrv2", "minimal"))
    for engine in ("host", "off")
]


def options(runner: str, region: str, engine: str, **more: Any) -> dict[str, Any]:
    return {"runner": runner, "region": region, "engine": engine, "split_ops": SPLIT, **more}


def moved_read(a: Tensor, b: Tensor) -> Tensor:
    """Under minimal the update of b moves before the split op: right only while the two are disjoint."""
    toy.attn(a.clone(), a)
    b.add_(b * 0.5)
    out = torch.empty_like(a)
    toy.attn(a, out)
    return out + 1


def moved_write(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = toy.fresh(a * 2)
    b.mul_(3)
    return toy.fresh(h) + a, b[:2]


def two_writes(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    h = toy.fresh(b)
    b.mul_(2)
    a.sub_(h)
    return a * b


def through_views(a: Tensor, b: Tensor) -> Tensor:
    a[:, :2].add_(1)
    h = toy.fresh(b[:, 1:].contiguous())
    b.t().mul_(2)
    return h.sum() + a


def apart() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randn(6, 4)


def shifted() -> tuple[Tensor, Tensor]:
    memory = torch.randn(8, 4)
    return memory[:6], memory[2:]


def the_same() -> tuple[Tensor, Tensor]:
    memory = torch.randn(6, 4)
    return memory[:], memory[:]


def inside() -> tuple[Tensor, Tensor]:
    memory = torch.randn(12, 4)
    return memory[::2], memory[3:9]


def call_like_eager(
    compiled: Callable[..., Any], fn: Callable[..., Any], make: Callable[[], tuple[Tensor, Tensor]]
) -> None:
    given = make()
    copies = clone_all(given)
    torch.testing.assert_close(compiled(*copies), fn(*given), rtol=0, atol=0)
    torch.testing.assert_close(copies, given, rtol=0, atol=0)
    LOG.clear()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("plan", PLANS, ids=" ".join)
@pytest.mark.parametrize("fn", [moved_read, moved_write, two_writes, through_views])
def test_inputs_that_come_to_overlap_give_what_eager_gives(fn: Callable[..., Any], plan: tuple[str, str, str]) -> None:
    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, options=options(*plan))
    for make in (apart, apart, apart, shifted, the_same, inside, apart, shifted):
        call_like_eager(compiled, fn, make)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS, ids=" ".join)
@pytest.mark.parametrize("fn", [moved_read, two_writes])
def test_inputs_that_overlap_in_the_first_call_and_not_later(
    fn: Callable[..., Any], plan: tuple[str, str, str]
) -> None:
    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, options=options(*plan))
    for make in (shifted, shifted, apart, apart, apart, the_same, shifted):
        call_like_eager(compiled, fn, make)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled_pieces_and_streams_are_left_alone(compiler: str) -> None:
    chosen = options("mrv2", "minimal", "host", piece_compiler=compiler, aux_streams=2)
    compiled = torch.compile(two_writes, backend="dsv4_piecewise", dynamic=True, options=chosen)
    for make in (apart, apart, apart):
        call_like_eager(compiled, two_writes, make)
    with counters.expect(traced_graph_calls=3, uncaptured_calls=3, captures=0, replays=0, uncompiled_pieces=0):
        for make in (shifted, the_same, shifted):
            call_like_eager(compiled, two_writes, make)


def test_buffers_of_another_model_may_overlap() -> None:
    """Two instances of one class share a graph; the buffers of the second are views of one memory."""

    class Model(torch.nn.Module):
        def __init__(self, first: Tensor, second: Tensor) -> None:
            super().__init__()
            self.register_buffer("first", first)
            self.register_buffer("second", second)

        def forward(self, x: Tensor) -> Tensor:
            h = toy.fresh(x + self.second)
            self.first.add_(1)
            return h * self.second

    torch.manual_seed(0)
    memory = torch.randn(9, 4)
    for first, second in ((torch.randn(8, 4), torch.randn(8, 4)), (memory[1:], memory[:8])):
        model, eager = Model(first, second), Model(*clone_all((first, second)))
        compiled = torch.compile(
            model, backend="dsv4_piecewise", dynamic=True, options=options("mrv1", "minimal", "host")
        )
        for _ in range(4):
            x = torch.randn(8, 4)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), eager(x))
            torch.testing.assert_close(model.first, eager.first)


def test_it_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(
        moved_read, backend="dsv4_piecewise", dynamic=True, options=options("mrv1", "minimal", "host")
    )
    for _ in range(3):
        compiled(*apart())
    ops = 0
    with counters.expect(traced_graph_calls=3, uncaptured_calls=3), caplog.at_level(logging.WARNING, "dsv4_compile"):
        for _ in range(3):
            before = counters.eager_op_calls
            compiled(*shifted())
            ops = counters.eager_op_calls - before
    assert ops == 7  # clone, attn, mul, add_, empty_like, attn, add
    said = [record.message for record in caplog.records if "traced graph" in record.message]
    assert said == [
        "calls run the traced graph itself, op by op, where inputs share memory in another way than when the graph was "
        "traced, and one of them is written"
    ]


def test_modes_are_those_of_the_caller_and_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, bool]:
        with torch.autocast("cpu", torch.bfloat16):
            h = a @ b.t()
        b.add_(1)
        return toy.fresh(h), torch.is_autocast_enabled("cpu")

    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, options=options("mrv2", "narrow", "host"))
    for make in (apart, apart, apart, shifted):
        given = make()
        copies = clone_all(given)
        (mine, inner), (theirs, _) = compiled(*copies), fn(*given)
        assert mine.dtype == theirs.dtype == torch.bfloat16
        assert not inner
        torch.testing.assert_close(mine, theirs)
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_between_two_switches_leaves_no_mode() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            b.add_(1)
            return toy.fresh(a @ b.t())

    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, options=options("mrv2", "narrow", "host"))
    for _ in range(3):
        compiled(*apart())

    def refuse(x: Tensor) -> Tensor:
        raise ValueError("on purpose")

    with torch.library._scoped_library("toy", "IMPL") as library:
        library.impl("fresh", refuse, "AutogradCPU")
        with pytest.raises(ValueError, match="on purpose"):
            compiled(*shifted())
    assert not torch.is_autocast_enabled("cpu")
    call_like_eager(compiled, fn, shifted)


def test_captures_ahead_put_back_what_such_a_call_writes() -> None:
    compiled = torch.compile(
        moved_read, backend="dsv4_piecewise", dynamic=True, options=options("mrv2", "narrow", "host")
    )
    for _ in range(2):
        compiled(*apart())
    kept: list[Sequence[Tensor]] = []

    def inputs_for(tokens: int) -> tuple[Tensor, Tensor]:
        memory = torch.randn(tokens + 2, 4)
        kept.append((memory, memory.clone()))
        return memory[:tokens], memory[2:]

    dsv4_compile.capture(compiled, inputs_for, [5, 7])
    for memory, before in kept:
        assert torch.equal(memory, before)


def smooth(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y @ y.t(), (y * 2)[1:]


def smooth_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    y[1:].mul_(y[:1])
    return y, y.t()


def smooth_around_an_op(x: Tensor) -> tuple[Tensor, Tensor]:
    h = toy.fresh(x.detach() + 1)
    return x * h, h


def with_tangents(run: Callable[..., Any], x: Tensor, tangent: Tensor) -> list[Any]:
    with torch.no_grad(), forward_ad.dual_level():
        results = run(forward_ad.make_dual(x, tangent))
        return [part for result in results for part in forward_ad.unpack_dual(result)]


@pytest.mark.parametrize("more", [{}, {"engine": "off"}, {"piece_compiler": "aot_eager"}], ids=str)
@pytest.mark.parametrize("fn", [smooth, smooth_in_place, smooth_around_an_op])
def test_tangents_go_through(fn: Callable[..., Any], more: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(fn, backend="dsv4_piecewise", dynamic=True, options={"split_ops": SPLIT, **more})
    for _ in range(2):
        for _ in range(3):  # without, and captured
            x = torch.randn(5, 4)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), fn(x))
        tangent = torch.randn(5, 4)
        wanted = with_tangents(fn, x, tangent)
        with counters.expect(traced_graph_calls=1, captures=0):
            found = with_tangents(compiled, x, tangent)
        assert [part is None for part in found] == [part is None for part in wanted]
        torch.testing.assert_close([p for p in found if p is not None], [p for p in wanted if p is not None])
    assert sum("tangents" in record.message for record in caplog.records) == 1


def in_functionalize(run: Callable[..., Any], x: Tensor) -> Any:
    return torch.func.functionalize(run)(x)


def as_functional_tensor(run: Callable[..., Any], x: Tensor) -> Any:
    given = torch._to_functional_tensor(x)
    results = [torch._from_functional_tensor(result) for result in run(given)]
    torch._sync(given)
    return [*results, torch._from_functional_tensor(given)]


def as_zeros(run: Callable[..., Any], x: Tensor) -> Any:
    return run(torch._efficientzerotensor(x.shape))


def reads_only(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    y[0] = 1
    return y, toy.fresh(y).t()


def with_a_constant(x: Tensor) -> tuple[Tensor, Tensor]:
    return toy.fresh(x + 1), x * 2


def writes_its_input(x: Tensor) -> tuple[Tensor, Tensor]:
    x[1:].add_(1)
    return toy.fresh(x), x


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ["host", "off"])
@pytest.mark.parametrize(
    ("call", "fn"),
    [
        (in_functionalize, reads_only),
        (in_functionalize, writes_its_input),
        (as_functional_tensor, reads_only),
        (as_functional_tensor, writes_its_input),
        (as_zeros, with_a_constant),
    ],
)
def test_inputs_without_memory(call: Callable[..., Any], fn: Callable[..., Any], engine: str) -> None:
    compiled = torch.compile(fn, backend="dsv4_piecewise", options=options("mrv2", "narrow", engine))
    for n in (4, 4, 4, 5):
        x, same = torch.arange(4.0 * n).view(n, 4), torch.arange(4.0 * n).view(n, 4)
        with torch.no_grad():
            torch.testing.assert_close(call(compiled, x), call(fn, same))
            assert torch.equal(x, same)
            torch.testing.assert_close(compiled(x), fn(same))  # another graph, which is captured
    assert (counters.captures > 0) == (engine == "host")


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.quantize_per_tensor(x, 0.1, 3, torch.qint8)
    return toy.fresh(x) + q.dequantize(), q.int_repr()


def quantized_by_channel(x: Tensor) -> Tensor:
    q = torch.quantize_per_channel(x, torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int64), 0, torch.quint8)
    return toy.fresh(x) + q.dequantize()


@pytest.mark.filterwarnings("ignore:torch.quantize_per:UserWarning")
@pytest.mark.parametrize("engine", ["host", "off"])
@pytest.mark.parametrize("fn", [quantized, quantized_by_channel])
def test_values_that_are_more_than_memory(fn: Callable[..., Any], engine: str) -> None:
    compiled = torch.compile(fn, backend="dsv4_piecewise", options=options("mrv2", "narrow", engine))
    for _ in range(3):
        x = torch.randn(4, 4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), fn(x))
    assert (counters.traced_graph_calls > 0) == (fn is quantized)  # Dynamo breaks the graph at the other one
