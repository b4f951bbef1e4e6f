"""Weights that are DTensors or quantised: reloaded, replaced, moved, told apart, as plain ones are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsv4_compile import counters

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

if dist.is_available():
    from processes import free_port, gloo_group, in_processes, values_of
    from sharded import ShardedMLP, mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.two_tensor import TwoTensor


@pytest.fixture
def group() -> Iterator[None]:
    with gloo_group(0, 1, free_port()):
        yield


def agrees(model: nn.Module, compiled: Any, rows: int = 3) -> None:
    x = torch.arange(4.0 * rows).reshape(rows, 4)
    assert torch.equal(compiled(x), model(x))


@torch.no_grad()
def reload_and_replace(rank: int = 0, **options: Any) -> list[int]:
    """The captures after each change of the weights, over calls that are compared with eager."""
    model, other = ShardedMLP(mesh(), seed=0), ShardedMLP(mesh(), seed=1)
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)
    captures = []
    for _ in range(3):
        agrees(model, compiled)
    captures.append(counters.captures)

    model.load_state_dict(other.state_dict())  # in place: the same addresses
    agrees(model, compiled)
    captures.append(counters.captures)

    model.load_state_dict(ShardedMLP(mesh(), seed=2).state_dict(), assign=True)  # other addresses
    for _ in range(2):
        agrees(model, compiled)
    captures.append(counters.captures)

    model.head.weight = nn.Parameter(other.head.weight.detach().clone(), requires_grad=False)
    for _ in range(2):
        agrees(model, compiled)
    captures.append(counters.captures)

    model.up.weight._local_tensor = other.up.weight.to_local().clone()  # what a class does to itself
    for _ in range(2):
        agrees(model, compiled)
    captures.append(counters.captures)
    assert counters.graphs_compiled == 1
    return captures


def test_weights_are_reloaded_in_place_and_replaced(group: None) -> None:
    assert reload_and_replace() == [1, 1, 2, 3, 4]


def in_two(rank: int) -> list[int]:
    return reload_and_replace(rank, region="minimal")


@pytest.mark.exhaustive
def test_weights_of_two_processes_are_reloaded_in_place_and_replaced() -> None:
    assert values_of(in_processes(in_two)) == [[1, 1, 2, 3, 4]] * 2


@torch.no_grad()
def test_instances_of_a_class_are_told_apart_by_the_tensors_they_hold(group: None) -> None:
    models = [ShardedMLP(mesh(), seed=seed) for seed in range(2)]
    compiled = [torch.compile(model, backend="dsv4_piecewise", dynamic=True) for model in models]
    for _ in range(3):
        for model, each in zip(models, compiled, strict=True):
            agrees(model, each)
    assert (counters.graphs_compiled, counters.captures, counters.recaptures) == (1, 2, 0)


@torch.no_grad()
def test_what_was_captured_with_a_weight_goes_with_it(group: None) -> None:
    model = ShardedMLP(mesh())
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True)
    for _ in range(3):
        agrees(model, compiled)
    held = weakref.ref(model.up.weight.to_local())
    model.up.weight = nn.Parameter(model.up.weight.detach().clone(), requires_grad=False)
    agrees(model, compiled)
    assert held() is None


@torch.no_grad()
def test_a_marked_subclass_is_static_and_its_tensors_are_bound(group: None) -> None:
    on = mesh()
    cache = DTensor.from_local(torch.zeros(8, 4), on)
    torch._dynamo.mark_static_address(cache)

    def writes(x: Tensor, cache: DTensor) -> Tensor:
        cache.to_local()[: x.shape[0]] = x
        return (cache.to_local() + 1).sum(0)

    compiled = torch.compile(writes, backend="dsv4_piecewise", dynamic=True)
    for number in range(3):
        result = compiled(torch.full((3, 4), float(number)), cache)
        assert torch.equal(result, torch.full((4,), 8.0 + 3 * number))
        assert cache.to_local()[:3].eq(number).all()
    assert counters.captures == 1


@torch.no_grad()
def test_sizes_within_another_subclass_that_dynamo_does_not_look_at_are_looked_at(
    group: None, caplog: pytest.LogCaptureFixture
) -> None:
    def make(rows: int) -> TwoTensor:
        return TwoTensor(*(DTensor.from_local(torch.ones(rows, 4), mesh()) for _ in range(2)))

    compiled = torch.compile(lambda x: x + 1, backend="dsv4_piecewise")
    for rows in (5, 6, 6, 6, 7, 7):
        assert compiled(make(rows)).a.shape == (rows, 4)
    assert (counters.replays, counters.traced_graph_calls) == (2, 2)
    assert caplog.text.count("where a wrapper subclass has other sizes than when the graph was traced") == 1


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """A group in which this process is the second of two, and collectives move nothing between them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def rows_of_the_second(rows: int) -> DTensor:
    """What the second of two ranks has of a tensor of so many rows, sharded; where the number is odd, one row less."""
    local = torch.arange(4.0 * (rows // 2)).reshape(-1, 4)
    return DTensor.from_local(local, mesh(), [Shard(0)], run_check=False, shape=torch.Size((rows, 4)), stride=(4, 1))


@pytest.mark.parametrize("dynamic", [True, None])
@torch.no_grad()
def test_sizes_that_only_the_whole_of_a_sharded_tensor_has_are_looked_at(
    second_of_two: None, dynamic: bool | None
) -> None:
    """Dynamo leaves constants to the tensor within: one row, of two and of three. (AOTAutograd returns two rows.)"""

    def gathers(x: DTensor) -> Any:
        return (x * 2).full_tensor()

    compiled = torch.compile(gathers, backend="dsv4_piecewise", dynamic=dynamic)
    for rows in (2, 2, 2, 3, 3, 2, 5, 5, 4, 7, 6, 7, 3, 1, 1):
        assert compiled(rows_of_the_second(rows)).tolist() == gathers(rows_of_the_second(rows)).tolist()
    assert counters.replays > 0


class Int8(Tensor):
    """A weight as codes and a scale for each row."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Int8:
        made: Int8 = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Int8:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return func(*[arg.codes * arg.scale if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))


def quantise(model: nn.Sequential) -> None:
    """Codes of int8 in every linear layer."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
            codes = (layer.weight.detach() / scale).round().to(torch.int8)
            layer.weight = nn.Parameter(Int8(codes, scale), requires_grad=False)


def quantise_by_torchao(model: nn.Sequential) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


@pytest.mark.parametrize("by", [quantise, quantise_by_torchao])
@torch.no_grad()
def test_int8_weights(by: Any) -> None:
    models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval() for _ in range(3)]
    for each in models:
        by(each)
    model, second, third = models
    compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True)

    def agree(*rows: int) -> None:
        for count in rows:
            x = torch.arange(8.0 * count).reshape(count, 8)
            assert torch.equal(compiled(x), model(x))

    agree(3, 3, 3, 5, 5)
    with counters.expect(captures=0, replays=2, uncaptured_calls=0):
        model.load_state_dict(second.state_dict())  # in place
        agree(3, 5)
    with counters.expect(captures=1, recaptures=1):
        model.load_state_dict(third.state_dict(), assign=True)
        agree(5, 5)
    assert counters.graphs_compiled == 1
