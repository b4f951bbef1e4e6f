"""Wrapper subclasses whose tensors are also somebody else's: arguments that share memory, tied weights, plain views."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

if dist.is_available():
    import torch.distributed._functional_collectives as fc
    from processes import free_port, gloo_group
    from sharded import described, mesh, sharded
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.two_tensor import TwoTensor

OPTIONS: list[dict[str, Any]] = [{}, {"check": "full", "region": "minimal", "runner": "mrv1"}]
Make = Callable[[], tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with gloo_group(0, 1, free_port()):
        yield


@torch.no_grad()
def check(function: Any, makes: Sequence[Make], options: dict[str, Any]) -> None:
    """Results of calls, and what is left in their arguments, are those of eager."""
    compiled = torch.compile(function, backend="dsv4_piecewise", dynamic=True, options=options)
    for number, make in enumerate(makes):
        ours, theirs = make(), make()
        given, wanted = described(compiled(*ours)), described(function(*theirs))
        assert (number, given, described(ours)) == (number, wanted, described(theirs))


def numbers(size: int = 4) -> Tensor:
    return torch.arange(float(size))


def two_apart() -> tuple[Tensor, ...]:
    return TwoTensor(numbers(), numbers() + 1), TwoTensor(numbers() + 2, numbers() + 3)


def two_that_share() -> tuple[Tensor, ...]:
    shared = numbers()
    return TwoTensor(shared, numbers() + 1), TwoTensor(shared, numbers() + 3)


def two_that_share_crosswise() -> tuple[Tensor, ...]:
    shared = numbers()
    return TwoTensor(shared, numbers() + 1), TwoTensor(numbers() + 2, shared)


def halves_apart() -> tuple[Tensor, ...]:
    return TwoTensor(numbers(), numbers()), numbers(3)


def halves_that_are_one() -> tuple[Tensor, ...]:
    shared = numbers()
    return TwoTensor(shared, shared), numbers(3)


def with_a_view() -> tuple[Tensor, ...]:
    shared = numbers()
    return TwoTensor(shared, numbers()), shared[1:]


def writes_the_first(x: Tensor, y: Tensor) -> Any:
    x.add_(1)
    return y * 2, x * 3


def writes_the_second(x: Tensor, y: Tensor) -> Any:
    y.add_(1)
    return x * 2, y * 3


@pytest.mark.sampled(7)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("function", [writes_the_first, writes_the_second])
@pytest.mark.parametrize(
    "makes",
    [
        [two_apart, two_apart, two_that_share, two_that_share, two_that_share_crosswise, two_apart],
        [two_that_share, two_that_share, two_that_share, two_apart, two_apart, two_that_share],
        [halves_apart, halves_apart, halves_that_are_one, halves_that_are_one, with_a_view, halves_apart],
        [halves_that_are_one, halves_that_are_one, halves_that_are_one, halves_apart, halves_apart],
        [with_a_view, with_a_view, with_a_view, halves_apart, halves_apart, with_a_view],
    ],
    ids=lambda makes: makes[0].__name__,
)
def test_arguments_that_share_memory(makes: Sequence[Make], function: Any, options: dict[str, Any]) -> None:
    check(function, makes, options)


class Tied(nn.Module):
    """An embedding and a head, sharded over the vocabulary, which are one parameter, one memory, or one transposed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.on = mesh()
        table = sharded(torch.randn(10, 4), self.on, Shard(0))
        self.table = nn.Parameter(table, requires_grad=False)
        heads = {
            "parameter": lambda: self.table,
            "memory": lambda: parameter_of(table.to_local(), self.on, Shard(0)),
            "transposed": lambda: parameter_of(table.to_local().t(), self.on, Shard(1)),
        }
        self.head = heads[how]()
        self.is_transposed = how == "transposed"

    def forward(self, ids: Tensor) -> Tensor:
        ids = DTensor.from_local(ids, self.on, [Replicate()], run_check=False)
        hidden = nn.functional.embedding(ids, self.table).redistribute(placements=[Replicate()])
        logits = hidden @ (self.head if self.is_transposed else self.head.t())
        result: Tensor = logits.redistribute(placements=[Replicate()]).to_local()
        return result


def parameter_of(local: Tensor, on: Any, placement: Any) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(local, on, [placement]), requires_grad=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["parameter", "memory", "transposed"])
@torch.no_grad()
def test_weights_that_are_tied_and_then_are_not(how: str) -> None:
    model = Tied(how)
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True)
    ids = torch.arange(5)

    def agree(times: int) -> None:
        for _ in range(times):
            assert torch.equal(compiled(ids), model(ids))

    agree(3)
    model.table.to_local().mul_(2)
    agree(1)
    model.head = nn.Parameter(model.head.detach().clone() * 3, requires_grad=False)
    agree(3)
    model.table.to_local().mul_(2)
    agree(1)


class WithView(nn.Module):
    """A DTensor, and a plain buffer that is a part of its memory and is written between its uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.on = mesh()
        self.weight = parameter_of(torch.randn(4, 4), self.on, Replicate())
        self.register_buffer("part", self.weight.to_local()[1:3])

    def forward(self, x: Tensor) -> Any:
        before = (DTensor.from_local(x, self.on, [Replicate()]) @ self.weight).to_local()
        self.part.add_(1)
        return before, (DTensor.from_local(x, self.on, [Replicate()]) @ self.weight).to_local(), self.part.sum()


@pytest.mark.parametrize("options", OPTIONS[:1], ids=str)
@torch.no_grad()
def test_a_plain_view_of_what_a_weight_holds(options: dict[str, Any]) -> None:
    ours, theirs = WithView(), WithView()
    compiled = torch.compile(ours, backend="dsv4_piecewise", dynamic=True, options=options)
    for rows in (3, 3, 3, 5, 5):
        x = numbers(4 * rows).reshape(rows, 4)
        assert described(compiled(x)) == described(theirs(x))
        assert torch.equal(ours.part, theirs.part)


# bodies


def chooses(flag: Tensor, x: Tensor) -> Any:
    return torch.cond(flag, lambda t: fc.all_reduce(t * 2, "sum", dist.group.WORLD) + 1, lambda t: t - 1, (x,))


def checkpoints(x: Tensor) -> Any:
    def body(t: Tensor) -> Tensor:
        return fc.all_reduce(t * 2, "sum", dist.group.WORLD) + 1

    return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False) * 2


def checkpoints_a_dtensor(x: DTensor) -> Any:
    def body(t: DTensor) -> DTensor:
        return t.redistribute(placements=[Replicate()]) * 2

    return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False).to_local() + 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("function", "make"),
    [
        (chooses, lambda flag: (torch.tensor(flag), numbers())),
        (checkpoints, lambda flag: (numbers(),)),
        (checkpoints_a_dtensor, lambda flag: (sharded(numbers(8).reshape(2, 4), mesh(), Shard(0)),)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bodies_with_collectives_or_subclasses(function: Any, make: Any, options: dict[str, Any]) -> None:
    check(function, [lambda: make(True), lambda: make(False)] * 2, options)
