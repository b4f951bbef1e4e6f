"""Wrapper subclasses of Tensor are taken out of the graph: results, names, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from eager_twin import compile_piecewise
from torch import Tensor

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.compat.subclasses import trace_in_plain_tensors
from dsv4_compile.errors import TrainingError, UnsupportedInputError
from dsv4_compile.graph import desugar
from dsv4_compile.graph.plain_inputs import checked_recipe

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

if dist.is_available():
    from processes import free_port, gloo_group, in_processes, values_of
    from sharded import CASES, Make, Programs, ShardedMLP, differences, mesh, replicated
    from torch.testing._internal.two_tensor import TwoTensor

OPTIONS: list[dict[str, Any]] = [{}, {"check": "full", "region": "minimal", "runner": "mrv1"}, {"engine": "off"}]


@pytest.fixture
def group() -> Iterator[None]:
    with gloo_group(0, 1, free_port()):
        yield


@pytest.mark.sampled(17)
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("name", "make"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_results_are_those_of_eager(
    group: None, name: str, make: Make, options: dict[str, Any], dynamic: bool | None
) -> None:
    assert differences(Programs(mesh()), name, make, options, dynamic) == []


def in_two(rank: int) -> list[str]:
    found = []
    for name, make in CASES[:12]:
        torch._dynamo.reset()
        found += [f"{name}: {line}" for line in differences(Programs(mesh()), name, make, {}, True)]
    return found


@pytest.mark.exhaustive
def test_results_of_two_processes_are_those_of_eager() -> None:
    assert values_of(in_processes(in_two)) == [[], []]


def test_the_plan_names_the_tensors_that_weights_hold(group: None) -> None:
    with torch.no_grad():
        plan = dsv4_compile.explain(ShardedMLP(mesh()), torch.ones(3, 4))
    names = [value.name for value in plan.inputs if value.origin == "weight"]
    assert names == ["up.weight.local", "down.weight.local", "head.weight.local", "head.bias.local"]
    assert "aten::addmm[head.bias.local]" in str(plan)


def test_a_graph_without_subclasses_is_not_touched() -> None:
    graphs = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        plain = desugar.in_plain_tensors(gm, example_inputs)
        graphs.append((plain.gm is gm, plain.example_inputs is example_inputs, plain.inputs))
        return gm

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert graphs == [(True, True, None)]


def test_sizes_that_only_a_local_tensor_has_are_part_of_the_bucket(group: None) -> None:
    programs = Programs(mesh())
    compiled = torch.compile(programs.gathers, backend="dsv4_piecewise", dynamic=True)
    for n in (5, 5, 6, 6):
        compiled(replicated(programs, n))
    assert counters.graphs_compiled == 1
    assert counters.captures == 2


class Own(TwoTensor):  # type: ignore[misc]
    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["a"], inner["b"])


class Sealed(Own):
    """Names what is no tensor."""

    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        return [*names, "note"], context

    note = 3


class Forgetful(TwoTensor):  # type: ignore[misc]
    """Is a `TwoTensor` once it is made again."""


class Swapped(Own):
    """Has other tensors after it was written."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            args[0].a = args[0].a.clone()
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class Unread(Own):
    """Gives no value away."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("subclass", [TwoTensor, Unread])
def test_a_wrapper_subclass_is_served_unread(subclass: Any) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dsv4_piecewise")
    with torch.no_grad():
        for number in range(3):
            result = compiled(subclass(torch.ones(1), torch.ones(1) + number))
            assert type(result) is type(subclass(torch.ones(1), torch.ones(1)) + 1)
            assert (result.a.item(), result.b.item()) == (2, 2 + number)
    assert counters.replays == 2


def test_what_cannot_be_taken_apart_is_refused_by_name() -> None:
    sealed = TwoTensor(torch.ones(1), torch.ones(1))
    with pytest.raises(UnsupportedInputError) as refused:
        checked_recipe(Sealed(sealed.a, sealed.b), "layers.0.weight")
    assert str(refused.value) == (
        "layers.0.weight is a Sealed, which cannot be taken apart into plain tensors: its attribute note holds a int, "
        "which is no tensor. Give its class a __tensor_flatten__ that names its tensors, or unwrap it and keep its "
        "user outside of the model"
    )


def test_a_class_that_makes_another_one_of_its_tensors_is_refused() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dsv4_piecewise")
    message = "^x is a Forgetful, and its __tensor_unflatten__ makes a TwoTensor: let it make"
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=message):
        compiled(Forgetful(torch.ones(1), torch.ones(1)))


def test_a_write_that_its_tensors_do_not_show_is_refused() -> None:
    def writes(x: Tensor) -> Tensor:
        return x.add_(1) * 2

    compiled = torch.compile(writes, backend="dsv4_piecewise")
    message = "^x, a Swapped, is given other memory, sizes or placements in place"
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=message):
        compiled(Swapped(torch.ones(2), torch.ones(2)))


class Failing(Own):
    """Has no rule for an op, once Dynamo has traced it."""

    fails = False

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.fails and func is torch.ops.aten.mul.Tensor:
            raise ValueError("no rule for it")
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_an_op_that_fails_on_plain_tensors_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubles(x: Tensor) -> Tensor:
        return x * 2

    run = desugar.trace_in_plain_tensors

    def traced(*args: Any) -> Any:
        monkeypatch.setattr(Failing, "fails", True)
        return run(*args)

    monkeypatch.setattr(desugar, "trace_in_plain_tensors", traced)
    compiled = torch.compile(doubles, backend="dsv4_piecewise")
    message = (
        r"^mul cannot be told in ops on plain tensors \(.*test_desugar.py:\d+ in doubles: return x \* 2\): x is a "
        r"Failing, ValueError: no rule for it. Give it plain tensors"
    )
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=message):
        compiled(Failing(torch.ones(2), torch.ones(2)))


def test_training_is_refused_as_ever() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dsv4_piecewise")
    with pytest.raises(TrainingError, match=r"grad is enabled and x requires grad"):
        compiled(TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_())


def test_random_numbers_that_a_dtensor_draws_on_a_device_are_seen() -> None:
    """There DTensor sets the state of the generator before and after, which no op of the graph tells."""

    def drawn(device: str) -> list[str | None]:
        mode = torch._subclasses.FakeTensorMode()
        with mode:
            x = torch.ones(2, device=device)
        return list(map(desugar.random_op, trace_in_plain_tensors(torch.rand_like, [x], mode).graph.nodes))

    assert set(drawn("cpu")) == {None}
    assert set(drawn("meta")) == {None, "aten::rand_like.default"}


@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")
def test_random_numbers_of_a_dtensor_are_refused(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desugar, "random_op", lambda node: "aten::rand_like.default")
    compiled = torch.compile(torch.rand_like, backend="dsv4_piecewise")
    message = "^rand_like draws random numbers for a DTensor with aten::rand_like.default"
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=message):
        compiled(replicated(Programs(mesh()), 4))


def test_a_ragged_size_among_the_inputs_is_refused() -> None:
    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    message = r"x is a nested tensor with a ragged size.* pass its values\(\) and offsets\(\)"
    with torch.no_grad(), pytest.raises(UnsupportedInputError, match=message):
        compile_piecewise(lambda x: x * 2)(parts)


def test_a_nested_tensor_is_made_of_offsets_that_eager_has_used() -> None:
    def program(values: Tensor, offsets: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(values, offsets) * 2
        return nested.sin().values() + 1

    compiled = compile_piecewise(program)
    for offsets in ([0, 2, 6], [0, 2, 6], [0, 3, 6], [0, 1, 4, 8]):
        args = torch.randn(offsets[-1], 3), torch.tensor(offsets)
        with torch.no_grad():
            wanted = program(*args)  # first: torch keeps a size with the offsets from then on
            torch.testing.assert_close(compiled(*args), wanted)
