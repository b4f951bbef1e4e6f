"""Nobody refers to a user's tensor weakly, so torch swaps it; and what was captured still goes with its weights."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from runtime_helpers import call_often, compile_host, entries
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from weighted_model import Model

from dsv4_compile import counters
from dsv4_compile.runtime.program.marks import Mark, mark_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"check": "full", "pool": "bucket"},
    {"check": "off"},
    {"engine": "off"},
    {"piece_compiler": "aot_eager", "aux_streams": 2},
    pytest.param({"piece_compiler": "inductor"}, marks=pytest.mark.inductor),
]


@pytest.fixture
def swapping() -> Iterator[None]:
    """Modules convert their parameters by swapping tensors."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def agree(compiled: Any, model: Model, times: int = 3) -> None:
    """Calls of a compiled model are those of a copy of its eager one."""
    with torch.no_grad():
        for _ in range(times):
            x, eager = torch.randn(5, 4, dtype=model.w.dtype), copy.deepcopy(model)
            torch.testing.assert_close(compiled(x), eager(x))
            torch.testing.assert_close(model.seen, eager.seen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_tensor_of_the_user_is_referred_to_weakly(options: dict[str, Any]) -> None:
    model, x = Model(), torch.randn(5, 4)
    compiled = compile_host(model, **options)
    for _ in range(4):
        call_often(compiled, x, times=1)
        gc.collect()
        assert [weakref.getweakrefs(tensor) for tensor in (model.w, model.seen, x)] == [[], [], []]


@pytest.mark.parametrize("is_kept", [True, False], ids=["other kept", "other dropped"])
@pytest.mark.parametrize("name", ["w", "seen"])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_swapped_weights_are_captured_again(options: dict[str, Any], name: str, is_kept: bool) -> None:
    model = Model()
    compiled = compile_host(model, **options)
    agree(compiled, model)
    tensor = getattr(model, name)
    other = nn.Parameter(torch.randn_like(tensor), requires_grad=False) if name == "w" else torch.randn_like(tensor)
    kept = [other] if is_kept else []
    torch.utils.swap_tensors(tensor, other)
    del other
    with counters.expect(graphs_compiled=0, captures=1, recaptures=1, uncaptured_calls=0, replays=3):
        agree(compiled, model)
    assert len(entries()) == 1
    assert len(kept) == is_kept


def test_weights_that_are_swapped_back_and_forth() -> None:
    model, other = Model(), nn.Parameter(torch.randn(4, 4), requires_grad=False)
    compiled = compile_host(model)
    for _ in range(4):
        agree(compiled, model)
        torch.utils.swap_tensors(model.w, other)
    assert len(entries()) == 1


def test_memory_of_a_swapped_weight_goes_with_it() -> None:
    model = Model()
    compiled = compile_host(model)
    agree(compiled, model)
    gc.collect()
    gc.disable()
    try:
        old = StorageWeakRef(model.w.untyped_storage())
        other = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        torch.utils.swap_tensors(model.w, other)
        assert not old.expired()
        del other
        assert old.expired()  # without a call, and without the collector
        assert entries() == []
    finally:
        gc.enable()


CONVERSIONS: list[Callable[[Model], object]] = [
    lambda model: model.double(),
    lambda model: model.to(torch.float64),
    lambda model: model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}),
    lambda model: model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True),
]


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("convert", CONVERSIONS, ids=["double", "to", "load", "assign"])
def test_modules_convert_their_parameters_by_swapping(convert: Callable[[Model], object]) -> None:
    model = Model()
    compiled = compile_host(model)
    for _ in range(2):
        agree(compiled, model)
        convert(model)
        agree(compiled, model)
        model.float()


class Pair(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False).requires_grad_(False) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.ops.toy.fresh(self.first(x)))


def test_a_weight_that_two_layers_share_is_swapped() -> None:
    model = Pair()
    compiled, x = compile_host(model), torch.randn(3, 4)
    call_often(compiled, x)
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(4, 4), requires_grad=False))
    with torch.no_grad(), counters.expect(captures=1, recaptures=1):
        for _ in range(3):
            assert torch.equal(compiled(x), model(x))


# what a mark leaves behind


def test_a_saved_weight_loads_anywhere() -> None:
    model = Model()
    agree(compile_host(model), model)
    for tensor in (model.w, model.seen):
        assert isinstance(mark_of(tensor), Mark)
        file = io.BytesIO()
        torch.save(tensor, file)
        assert b"dsv4_compile.runtime" not in file.getvalue()
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), tensor)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor))])
def test_a_copy_has_a_mark_of_its_own(again: Callable[[Tensor], Tensor]) -> None:
    for tensor in (torch.ones(3), nn.Parameter(torch.ones(3))):
        mark = mark_of(tensor)
        other = again(tensor)
        assert mark_of(tensor) is mark
        assert isinstance(mark_of(other), Mark)
        assert mark_of(other) is not mark
        assert mark_of(copy.copy(tensor)) is mark  # it shares the memory too
