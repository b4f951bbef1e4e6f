"""What the runtime holds, for how long, and that all of it goes: with the weights, with the model, with a reset."""

from __future__ import annotations

import copy
import gc
import linecache
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from case_helpers import rows
from runtime_helpers import Allocations, call_often, compile_host, live_bytes, the_owner
from runtime_helpers import allocations as allocations  # a fixture
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsv4_compile import counters

toy = torch.ops.toy


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.register_buffer("cache", torch.zeros(32, width))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        self.cache[: x.shape[0]].add_(h)
        return toy.fresh(h).sin() + self.cache[: x.shape[0]] * 2


@contextmanager
def no_collector() -> Iterator[None]:
    """What goes away in here goes by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def programs_in_linecache() -> set[str]:
    """Names of the programs whose text a traceback would show."""
    return {path for path in linecache.cache if path.startswith("<dsv4_compile program")}


def storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# a reset


@pytest.mark.exhaustive
def test_reset_frees_everything(allocations: Allocations) -> None:
    before, programs = live_bytes(), programs_in_linecache()  # an exception kept by the test before holds its program
    model = Model()
    with_model = live_bytes()
    compiled = compile_host(model, static_outputs=True)
    for n in (5, 6, 32):
        call_often(compiled, rows(n, 64))
    assert live_bytes() > with_model
    owner = weakref.ref(the_owner())
    assert len(programs_in_linecache() - programs) == 3
    torch._dynamo.reset()
    assert live_bytes() == with_model
    assert programs_in_linecache() <= programs
    assert allocations.alive == []
    assert owner() is None
    del model, compiled
    assert live_bytes() == before


def test_reset_does_not_wait_for_the_collector(allocations: Allocations) -> None:
    """It is paused in many a serving loop, and knows nothing of memory on a device."""
    compiled = compile_host(Model(), static_outputs=True)
    call_often(compiled, rows(5, 64))
    assert allocations.alive != []
    gc.disable()
    try:
        torch._dynamo.reset()
        assert allocations.alive == []
    finally:
        gc.enable()


def test_reset_frees_graphs_that_somebody_still_holds(allocations: Allocations) -> None:
    """The callable that Dynamo compiled into may live on; what it captured does not."""
    model = Model()
    compiled = compile_host(model)
    call_often(compiled, rows(5, 64))
    owner = the_owner()
    with no_collector():
        torch._dynamo.reset()
        assert allocations.alive == []
    assert owner._pool.nbytes == 0


def test_model_works_again_after_a_reset() -> None:
    model = Model()
    for _ in range(3):
        compiled = compile_host(model)
        with counters.expect(graphs_compiled=1, captures=1, recaptures=0, uncaptured_calls=1):
            for _ in range(3):
                x, eager = rows(5, 64), copy.deepcopy(model)
                with torch.no_grad():
                    assert torch.equal(compiled(x), eager(x))
        torch._dynamo.reset()


def test_compiled_function_works_again_after_a_reset() -> None:
    compiled = compile_host(lambda x: toy.fresh(x * 2) + 1)
    x = rows(5)
    for _ in range(3):
        assert torch.equal(call_often(compiled, x), 4 * x + 1)
        torch._dynamo.reset()


# models that go


@pytest.mark.exhaustive
@pytest.mark.parametrize("reset", [False, True], ids=["dropped", "dropped and reset"])
def test_models_made_and_dropped_leave_nothing_behind(reset: bool) -> None:
    seen = []
    for _ in range(5):
        model = Model()
        compiled = compile_host(model)
        for n in (5, 6, 7):
            call_often(compiled, rows(n, 64))
        del model, compiled
        if reset:
            torch._dynamo.reset()
        seen.append(live_bytes())
    assert seen[1:] == seen[1:2] * 4  # the first one may leave the arena of the graph to those that share it


def test_weights_of_a_dropped_model_go_at_once() -> None:
    first, second = Model(), Model()
    compiled = [compile_host(model) for model in (first, second)]
    for function in compiled:
        call_often(function, rows(5, 64))
    gone = [storage_of(first.w), storage_of(first.cache)]
    kept = storage_of(second.w)
    compiled.clear()
    with no_collector():
        # a module compiled by torch is in a cycle of its own; its parameters need not wait for that
        first._parameters.clear()
        first._buffers.clear()
        assert all(storage.expired() for storage in gone)
        assert not kept.expired()


def test_weights_that_were_replaced_go_at_the_next_call() -> None:
    model = Model()
    compiled = compile_host(model)
    with torch.no_grad(), no_collector():
        for _ in range(4):
            for n in (5, 6):
                for _ in range(3):
                    compiled(rows(n, 64))
            old = storage_of(model.w)
            model.w.data = torch.randn(64, 64)
            compiled(rows(5, 64))
            assert old.expired()


@pytest.mark.exhaustive
def test_many_reloads_do_not_pile_up(allocations: Allocations) -> None:
    model = Model()
    compiled = compile_host(model)
    sizes = []
    for _ in range(6):
        model.load_state_dict(
            {name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=True
        )
        for n in (5, 6):
            call_often(compiled, rows(n, 64))
        sizes.append(live_bytes())
    assert sizes[1:] == sizes[1:2] * 5
    assert len(allocations.alive) == 1


def test_dropped_outputs_are_freed_at_once() -> None:
    compiled = compile_host(lambda x: toy.fresh(x * 2) + 1)
    call_often(compiled, rows(5))
    with no_collector(), torch.no_grad():
        result = compiled(rows(5))
        storage = storage_of(result)
        del result
        assert storage.expired()


def test_argument_is_not_kept() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        y.add_(x)
        return toy.fresh(x * 2) + y

    compiled = compile_host(f)
    with no_collector(), torch.no_grad():
        for _ in range(6):
            x, y = rows(5), rows(5)
            compiled(x, y)
        storages = [storage_of(x), storage_of(y)]
        del x, y
        assert all(storage.expired() for storage in storages)


def test_values_inside_of_a_call_are_freed_with_it() -> None:
    """What an eager op made is dropped when the call ends, and copies for later pieces are in the arena."""
    compiled = compile_host(lambda x: toy.fresh(toy.fresh(x * 2) + 1) - 1)
    call_often(compiled, rows(500, 64))
    held = live_bytes()
    x = rows(500, 64)
    with torch.no_grad():
        for _ in range(10):
            compiled(x)
    assert live_bytes() == held + x.untyped_storage().nbytes()


@pytest.mark.exhaustive
def test_long_run_over_few_buckets_holds_no_more_at_its_end() -> None:
    model = Model()
    compiled = compile_host(model)
    held = []
    with torch.no_grad():
        for index in range(400):
            compiled(rows(5 + index % 4, 64))
            if index % 100 == 99:
                held.append(live_bytes())
    assert held == held[:1] * 4


@pytest.mark.exhaustive
def test_run_over_ever_new_floats_holds_no_more_at_its_end() -> None:
    compiled = compile_host(lambda x, scale: toy.fresh(x * scale) + 1, max_captures=3)
    held = []
    with torch.no_grad():
        for index in range(300):
            compiled(rows(5), 0.1 + index)
            if index % 100 == 99:
                held.append(live_bytes())
    assert held == held[:1] * 3


def test_pool_holds_the_temporaries_of_the_largest_bucket_about_once() -> None:
    """Buckets share one pool, so the largest first costs about what it costs alone."""

    def f(x: Tensor) -> Tensor:
        return toy.fresh((x.exp() + 1).sin().cos()).exp().sin() - 1

    def pool_after(*sizes: int) -> int:
        torch._dynamo.reset()
        compiled = compile_host(f)
        for n in sizes:
            call_often(compiled, rows(n, 64))
        return the_owner()._pool.nbytes

    alone = pool_after(64)
    assert alone > 0
    assert pool_after(64, 32, 16, 8) <= 1.5 * alone


# copies and files


def test_copy_of_a_compiled_model_has_captures_of_its_own() -> None:
    model = Model(4)
    compiled = compile_host(model)
    call_often(compiled, rows(5))
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        other.w.mul_(-1)
        for _ in range(3):
            for function in (compiled, other):
                x, eager = rows(5), copy.deepcopy(function._orig_mod)
                assert torch.equal(function(x), eager(x))
                assert torch.equal(function.cache, eager.cache)
    assert not torch.equal(compiled.w, other.w)


def test_model_pickles_and_saves_without_what_was_captured() -> None:
    model = Model(4)
    fresh = pickle.dumps(model)
    compiled = compile_host(model)
    call_often(compiled, rows(5))
    model.cache.zero_()
    again = pickle.dumps(model)
    assert abs(len(again) - len(fresh)) < 256  # torch marks the module as compiled
    loaded = pickle.loads(again)
    assert torch.equal(loaded.w, model.w)
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in model.state_dict()]
    compiled.load_state_dict(compiled.state_dict())
    x, eager = rows(5), copy.deepcopy(loaded)
    reloaded = compile_host(loaded)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(reloaded(x), eager(x))
