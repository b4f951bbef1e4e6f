"""Cases about compiling and capturing: syncs, collection, threads; and what is left in a model afterwards."""

from __future__ import annotations

import copy
import gc
import pickle
import queue
import re
import threading

import pytest
import torch
from case_helpers import Pair, Setup, assert_same, check, everywhere, everywhere_and_compiled, reasons, rows
from torch import Tensor
from toy_ops import SPLIT, Host

import dsv4_compile
from dsv4_compile.backend import dsv4_piecewise

toy = torch.ops.toy


def x_only(n: int) -> tuple[Tensor]:
    return (rows(n),)


def times_its_sum(x: Tensor) -> Tensor:
    return toy.fresh(x.cos() * x.sum().item()) + 1


def masked_rows(x: Tensor) -> Tensor:
    return toy.fresh(x.cos()[x.sum(1) > 0]).sum(0) + x


def branching(x: Tensor) -> Tensor:
    h = toy.fresh(x.cos())
    return toy.fresh(h + 1) if (h > 1.9).any() else toy.fresh(h * 3).sin()


@pytest.mark.sampled(4)
@everywhere
@pytest.mark.parametrize("function", [times_its_sum, masked_rows, branching], ids=lambda f: f.__name__)
def test_b38_host_sync_breaks_the_graph(setup: Setup, function) -> None:
    check(setup, function, x_only, steady=False)


@everywhere
def test_b38_number_data_dependent_is_eager(setup: Setup) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(setup, times_its_sum, x_only, steady=False)
        plan = setup.explain(times_its_sum, rows(8))
    assert reasons(plan)["item"] == "item needs a device-to-host sync"
    assert reasons(plan)["mul"] == "takes item, a data-dependent scalar"
    assert "cos" in {op.op for piece in plan.pieces for op in piece.ops}


@everywhere
def test_b38_size_that_depends_on_data_is_eager(setup: Setup) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(setup, masked_rows, x_only, steady=False)
        plan = setup.explain(masked_rows, rows(8))
    assert re.search(r"(?<!function )(getitem|index|nonzero)", reasons(plan)["getitem"])
    assert "cos" in {op.op for piece in plan.pieces for op in piece.ops}


@everywhere
def test_b58_graph_of_dynamo_is_left_alone(setup: Setup) -> None:
    seen = []

    def backend(gm, example_inputs):
        before = gm.print_readable(print_output=False)
        compiled = dsv4_piecewise(gm, example_inputs, options=setup.options())
        again = dsv4_piecewise(gm, example_inputs, options=setup.options())
        seen.append((before, gm.print_readable(print_output=False)))

        def both(*args):
            first, second = compiled(*args), again(*args)
            assert_same(tuple(first), tuple(second))
            return first

        return both

    compiled = torch.compile(toy_layers, backend=backend, dynamic=True)
    for n in (8, 16) * 3:
        x = rows(n)
        with torch.no_grad():
            assert torch.equal(compiled(x), toy_layers(x))
    ((before, after),) = seen
    assert before == after


def toy_layers(x: Tensor) -> Tensor:
    for _ in range(3):
        x = toy.fresh(x * 2).view(-1, 4)
    return x


@everywhere
def test_b58_equal_pieces_are_compiled_once_and_others_not(setup: Setup) -> None:
    def f(x):
        for factor in (2, 2, 3, 2.0, True):
            x = toy.fresh(x * factor)
        return x

    with dsv4_compile.counters.expect(pieces_compiled=4, pieces_reused=1):
        check(setup, f, x_only)
    copies = [piece.duplicate_of for piece in setup.explain(f, rows(8)).pieces]
    assert copies == [None, "piece_0", None, None, None]


@everywhere_and_compiled
def test_b58_pieces_that_split_along_another_axis_are_no_copies(setup: Setup) -> None:
    def f(x):
        x = toy.fresh(x)
        for dim in (0, 1, 0, -2):
            x = toy.fresh(torch.cat(torch.split(x, 2, dim=dim)[::-1], dim=dim))
        return x

    pair = Pair(f, setup, dynamic=False)
    for _ in range(4):
        pair(rows(4))
    x = rows(4)
    torch._dynamo.mark_static(x)
    copies = [piece.duplicate_of for piece in setup.explain(f, x).pieces]
    assert copies == [None, None, "piece_0", None]


class Cycle:
    """Garbage that only the collector finds, and that works with a tensor when it goes."""

    gone = 0

    def __init__(self, tally: Tensor) -> None:
        self.own, self.tally = self, tally

    def __del__(self) -> None:
        Cycle.gone += 1
        self.tally.add_(1)


@pytest.mark.sampled(5)
@everywhere
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("splits", [True, False], ids=["eager", "captured"])
def test_b60_collection_during_a_call(
    setup: Setup, enabled: bool, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = torch.zeros(())
    monkeypatch.setattr(Cycle, "gone", 0)
    monkeypatch.setattr(Host, "function", staticmethod(lambda q: [q + 1, Cycle(tally), Cycle(tally)][0]))

    def f(x):
        out = torch.empty_like(x)
        toy.hook(x.sin(), out)
        return toy.fresh(out).cos()

    was_enabled, threshold = gc.isenabled(), gc.get_threshold()
    try:
        (gc.enable if enabled else gc.disable)()
        gc.set_threshold(1, 1, 1)
        check(setup, f, x_only, sizes=(8, 16) * 3, split_ops=(*SPLIT, "toy::hook") if splits else SPLIT)
        assert gc.isenabled() == enabled
        assert gc.get_threshold() == (1, 1, 1)
    finally:
        (gc.enable if was_enabled else gc.disable)()
        gc.set_threshold(*threshold)
    gc.collect()
    assert tally == Cycle.gone > 0  # no finaliser was recorded, to run again with every replay


@everywhere
def test_b60_error_during_a_call_restores_everything(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = {"now": False}

    def maybe_fail(q):
        if fails["now"]:
            raise RuntimeError("the op failed")
        return q + 1

    monkeypatch.setattr(Host, "function", staticmethod(maybe_fail))

    def f(x):
        out = torch.empty_like(x)
        toy.hook(x.sin(), out)
        return out.cos()

    pair = Pair(f, setup, split_ops=(*SPLIT, "toy::hook"))
    for failing_call in range(4):
        for call in range(4):
            fails["now"] = call == failing_call
            if fails["now"]:
                with torch.no_grad(), pytest.raises(RuntimeError, match="the op failed"):
                    pair.compiled(rows(8 + failing_call))
                assert gc.isenabled()
                assert torch.is_grad_enabled()
            else:
                pair(rows(8 + failing_call))


class Stream:
    """A side stream in terms of the host: a thread that works through what it is given, in order."""

    def __init__(self) -> None:
        self.work: queue.Queue = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while (task := self.work.get()) is not None:
            task()
            self.work.task_done()


@everywhere
def test_b60_work_forked_and_joined_inside_an_op(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()

    def fork_and_join(q):
        side = torch.empty_like(q)
        stream.work.put(lambda: torch.mul(q, 5, out=side))
        here = q * 3
        stream.work.join()
        return here + side

    monkeypatch.setattr(Host, "function", staticmethod(fork_and_join))

    def f(x):
        first, second = torch.empty_like(x), torch.empty_like(x)
        toy.hook(x.sin(), first)
        toy.hook(first.cos(), second)
        return first + second * 2

    check(setup, f, x_only, split_ops=(*SPLIT, "toy::hook"))
    stream.work.put(None)


@pytest.mark.sampled(2)
@everywhere
@pytest.mark.parametrize("sizes", [((8,), (16,)), ((8, 16), (8, 16)), ((8, 16), (16, 8), (32, 8))], ids=str)
def test_b60_threads_at_first_use(setup: Setup, sizes: tuple[tuple[int, ...], ...]) -> None:
    def f(x):
        a, b = toy.tup(x.sin())
        return toy.fresh(a.cos()) + b

    compiled = Pair(f, setup).compiled
    barrier, results = threading.Barrier(len(sizes)), []

    def serve(own: tuple[int, ...]) -> None:
        barrier.wait(timeout=250)
        with torch.no_grad():
            for n in own * 8:
                x = rows(n)
                results.append((compiled(x), f(x)))

    threads = [threading.Thread(target=serve, args=(own,)) for own in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=250)
    assert not any(thread.is_alive() for thread in threads)
    assert len(results) == 8 * sum(map(len, sizes))
    for actual, expected in results:
        assert_same(actual, expected, tolerant=setup.tolerant)
    serve_once_more = sorted({n for own in sizes for n in own})
    with torch.no_grad():
        for n in serve_once_more * 2:
            compiled(rows(n))
        if setup.captures:
            with dsv4_compile.counters.expect(captures=0, uncaptured_calls=0):
                for n in serve_once_more:
                    compiled(rows(n))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("cache", torch.zeros(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[: x.shape[0]] = x
        return self.second(toy.fresh(self.first(x)) + self.cache[: x.shape[0]])


def used(setup: Setup) -> Pair:
    pair = Pair(Model(), setup)
    for n in (8, 16) * 3:
        pair(rows(n))
    return pair


@everywhere
def test_b61_state_dict_goes_both_ways(setup: Setup) -> None:
    plain, pair = Model(), used(setup)
    names = [name.removeprefix("_orig_mod.") for name in pair.compiled.state_dict()]
    assert names == list(plain.state_dict())
    assert list(pair.original.state_dict()) == names
    plain.load_state_dict(pair.original.state_dict())
    assert_same(dict(plain.state_dict()), dict(pair.original.state_dict()))
    pair.original.load_state_dict(Model().state_dict())
    for n in (8, 16) * 2:
        pair(rows(n))


@everywhere
def test_b61_a_model_compiled_in_place_keeps_its_keys(setup: Setup) -> None:
    model = Model()
    before = list(model.state_dict())
    model.compile(backend="dsv4_piecewise", dynamic=True, options=setup.options())
    for n in (8, 16) * 3:
        with torch.no_grad():
            model(rows(n))
    assert list(model.state_dict()) == before
    assert [name for name, _ in model.named_buffers()] == ["cache"]


@everywhere
def test_b61_a_deep_copy_has_weights_of_its_own(setup: Setup) -> None:
    pair = used(setup)
    eager = copy.deepcopy(pair.compiled)
    with torch.no_grad():
        for weight in eager.parameters():
            weight.mul_(-2)
        for n in (8, 16) * 3:
            x = rows(n)
            expected = copy.deepcopy(eager._orig_mod)(x)
            assert torch.equal(eager(x), expected)
            pair(x)
            assert not torch.equal(expected, pair.original(x))


@everywhere
def test_b61_pickle_of_a_compiled_model(setup: Setup) -> None:
    model = Model()
    model.compile(backend="dsv4_piecewise", dynamic=True, options=setup.options())
    with torch.no_grad():
        for n in (8, 16) * 3:
            model(rows(n))
        loaded = pickle.loads(pickle.dumps(model))
        x = rows(8)
        assert torch.equal(loaded(x), model(x))
    assert vars(loaded).keys() == vars(Model()).keys()  # no arena, no graph
