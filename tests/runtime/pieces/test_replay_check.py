"""`check="full"` names the first piece whose replay differs; a frozen branch shows what it is made for.

`probe::shift` adds a number that lives on the host: a capture freezes it, and whoever changes it afterwards gets wrong
results from a replay, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from case_helpers import Pair, rows
from runtime_helpers import HOST, LIBRARY, Probe, call_often, compile_host
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4_compile import counters
from dsv4_compile.errors import AliasingOpError, LayoutMismatchError, ReplayMismatchError
from dsv4_compile.runtime.pieces.replay_check import CheckedReplay

toy, probe = torch.ops.toy, torch.ops.probe
# Their fakes lie about the dtype of the second result.
for _returns, _container in (("(Tensor, Tensor)", tuple), ("Tensor[]", list)):
    _name = f"widened_in_{_container.__name__}"
    LIBRARY.define(f"{_name}(Tensor q) -> {_returns}")
    LIBRARY.impl(_name, lambda q, into=_container: into((q + 1, 2 * q.double())), "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"probe::{_name}", lambda q, into=_container: into((torch.empty_like(q), torch.empty_like(q))), lib=LIBRARY
    )


@pytest.fixture(autouse=True)
def amount() -> Iterator[None]:
    before = Probe.amount
    yield
    Probe.amount = before


def three_pieces(x: Tensor) -> Tensor:
    h = toy.fresh(x.sin())
    h = toy.fresh(probe.shift(h) * 2)
    return probe.shift(h.cos())


def test_frozen_branch_gives_wrong_numbers_without_an_error() -> None:
    compiled = compile_host(three_pieces, check="addresses")
    x = rows(5)
    call_often(compiled, x)
    Probe.amount = 5.0
    with torch.no_grad():
        assert not torch.allclose(compiled(x), three_pieces(x))


def test_full_check_names_the_first_piece_that_differs_and_by_how_much() -> None:
    compiled = compile_host(three_pieces, check="full")
    x = rows(5)
    assert torch.equal(call_often(compiled, x), three_pieces(x))
    Probe.amount = 5.0
    with (
        torch.no_grad(),
        pytest.raises(ReplayMismatchError, match="the replay of piece_1 differs from running it uncaptured") as caught,
    ):
        compiled(x)
    assert "Greatest absolute difference: 8.0" in str(caught.value)  # 2 * (5 - 1)
    Probe.amount = 1.0
    with torch.no_grad():
        assert torch.equal(compiled(x), three_pieces(x))


def test_full_check_leaves_rounding_to_the_compiler() -> None:
    """As that of Inductor, which keeps float32 between fused ops of bfloat16; a frozen branch shows all the same."""

    def f(x: Tensor) -> Tensor:
        return toy.fresh(probe.shift(x * 3) * 7)

    def roughly(gm: fx.GraphModule, fakes: object) -> Callable[..., list[Tensor]]:
        return lambda *args: [1.01 * result for result in gm(*args)]

    compiled = compile_host(f, check="full", piece_compiler=roughly)
    assert not torch.allclose(call_often(compiled, rows(5)), f(rows(5)))
    Probe.amount = 5.0
    with torch.no_grad(), pytest.raises(ReplayMismatchError, match="the replay of piece_0"):
        compiled(rows(5))


def test_full_check_sees_what_a_piece_writes() -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache[: x.shape[0]].copy_(probe.shift(x))
        return toy.fresh(x)

    compiled = compile_host(f, check="full")
    cache = torch.zeros(16, 4)
    torch._dynamo.mark_static_address(cache)
    call_often(compiled, rows(5), cache)
    Probe.amount = 5.0
    match = "the replay of piece_0 differs from running it uncaptured in what it wrote to cache"
    with torch.no_grad(), pytest.raises(ReplayMismatchError, match=match):
        compiled(rows(5), cache)


def test_full_check_of_the_capturing_call_leaves_no_bucket() -> None:
    """Host state that changes between the capture and the comparison: the bucket is not kept."""
    compiled = compile_host(three_pieces, check="full")
    x = rows(5)
    changes = iter([1.0] * 2 + [1.0, 3.0])  # warm-up: two calls; the first piece that shifts: recording, comparison

    def called(op: str) -> None:
        Probe.amount = next(changes, 1.0)

    before, Probe.called = Probe.called, staticmethod(called)
    try:
        with torch.no_grad():
            compiled(x)
            with pytest.raises(ReplayMismatchError, match="the replay of piece_1 differs"):
                compiled(x)
            with counters.expect(captures=1, replays=1, uncaptured_calls=0):
                assert torch.equal(compiled(x), three_pieces(x))
    finally:
        Probe.called = before


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("cache", torch.zeros(16, 4))
        self.register_buffer("tail", self.cache[8:])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = nn.functional.dropout(x @ self.w, 0.5)
        self.cache[: x.shape[0]].mul_(0.5).add_(h)
        self.tail.add_(1)
        a = toy.fresh(h) + torch.rand_like(h)
        x.add_(a)
        left, right = (a + self.cache[: x.shape[0]]).chunk(2, dim=1)
        return toy.fresh(left) * right, x.sum()


def test_full_check_changes_nothing_else() -> None:
    """Mutations, overlapping buffers and random draws happen once, and no replay is found to differ."""
    models = [Model(), Model()]
    models[1].w.data.copy_(models[0].w)
    plain, checked = (
        compile_host(model, check=check) for model, check in zip(models, ("addresses", "full"), strict=True)
    )
    for n in (5, 6) * 4:
        x = rows(n)
        results = []
        for compiled in (plain, checked):
            torch.manual_seed(n)
            given = x.clone()
            with torch.no_grad():
                results.append((*compiled(given), given, torch.get_rng_state()))
        assert all(map(torch.equal, *results))
        assert torch.equal(models[0].cache, models[1].cache)


def test_check_off_trusts_the_caller() -> None:
    """The documented price: a static input that moves goes unnoticed."""
    compiled = compile_host(lambda x, table: toy.fresh(x) + table, check="off")
    table = torch.ones(4)
    torch._dynamo.mark_static_address(table)
    x = rows(5)
    call_often(compiled, x, table)
    other = torch.full((4,), 7.0)
    torch._dynamo.mark_static_address(other)
    with torch.no_grad(), counters.expect(captures=0, recaptures=0, replays=1):
        assert torch.equal(compiled(x, other), 2 * x + 1)
    table.fill_(3)
    with torch.no_grad():
        assert torch.equal(compiled(x, table), 2 * x + 3)


@pytest.mark.parametrize("check", ["addresses", "full"])
def test_static_input_that_moves_is_noticed(check: str) -> None:
    pair = Pair(lambda x, table: toy.fresh(x) + table, HOST, check=check)
    for expected in ({"recaptures": 0}, {"recaptures": 1}, {"recaptures": 1}):
        table = torch.randn(4)
        torch._dynamo.mark_static_address(table)
        with counters.expect(captures=1, **expected):
            for _ in range(3):
                pair(rows(5), table)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_op_inside_of_a_piece_that_returns_its_argument_is_named(compiler: str) -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        z = toy.sometimes(y, y)  # for 16 rows it is y itself
        y.add_(5)
        return toy.fresh(z + y)

    compiled = compile_host(f, piece_compiler=compiler)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(torch.ones(5, 4)), f(torch.ones(5, 4)))
        with pytest.raises(AliasingOpError, match=r"toy::sometimes\.default returned memory of an argument"):
            call_often(compiled, torch.ones(16, 4), times=1)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_op_inside_of_a_piece_whose_fake_lies_is_named_and_not_the_next_one(compiler: str) -> None:
    compiled = compile_host(lambda x: toy.fresh(toy.widened(x * 2) + 1), piece_compiler=compiler)
    with pytest.raises(LayoutMismatchError, match=r"toy::widened\.default gave \[5, 4\] torch.float64"):
        call_often(compiled, rows(5), times=1)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("op", ["widened_in_tuple", "widened_in_list"])
def test_so_is_one_that_gives_its_results_in_a_container(compiler: str, op: str) -> None:
    compiled = compile_host(lambda x: toy.fresh(getattr(probe, op)(x * 2)[1] + 1), piece_compiler=compiler)
    with pytest.raises(LayoutMismatchError, match=rf"probe::{op}\.default gave \[5, 4\] torch.float64"):
        call_often(compiled, rows(5), times=1)


def test_a_piece_that_only_draws_is_checked_with_the_random_state_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes no tensor of the device; what it gives tells where it draws."""
    asked: list[Any] = []

    @contextmanager
    def fork_rng(devices: Any) -> Iterator[None]:
        asked.extend(devices)
        yield

    with FakeTensorMode():
        slot = torch.empty(3, device="cuda")
    graph: Any = SimpleNamespace(written_by=lambda unit: frozenset(), inputs=())
    unit: Any = SimpleNamespace(name="piece_0", nodes=(), inputs=(), outputs=(SimpleNamespace(name="drawn"),))
    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(CheckedReplay, "_compare", lambda *_: None)
    CheckedReplay(graph, unit, lambda: [slot], [], [slot], lambda: None)()
    assert [device.type for device in asked] == ["cuda"]
