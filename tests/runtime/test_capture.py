"""`dsv4_compile.capture`: buckets ahead of serving, and no trace of the dummy calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from case_helpers import Pair, rows
from runtime_helpers import HOST, compile_host
from torch import Tensor, nn
from toy_ops import SPLIT, Host
from written_inputs import accumulate, static

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.errors import ArgumentError, CaptureError
from dsv4_compile.runtime.restore_inputs import RestoredInputs, RestoringCalls

toy = torch.ops.toy


class Cached(nn.Module):
    """Writes a buffer and an input, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        self.cache[: x.shape[0]].add_(x)
        seen.add_(1)
        return torch.ops.toy.fresh(self.cache[: x.shape[0]] + torch.rand_like(x))


def compiled(engine: str) -> tuple[Cached, Any]:
    model = Cached()
    options: dict[str, Any] = {"split_ops": SPLIT, "engine": engine}
    return model, torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)


@pytest.mark.parametrize("engine", ["off", "host"])
def test_dummy_calls_leave_no_trace(engine: str) -> None:
    model, run = compiled(engine)
    seen, random_state = torch.zeros(3), torch.get_rng_state()
    dsv4_compile.capture(run, lambda n: (torch.ones(n, 4), seen), [4, 8])
    assert model.cache.sum() == 0
    assert seen.sum() == 0
    assert torch.equal(torch.get_rng_state(), random_state)


@torch._dynamo.disable
def count_eagerly(calls: Tensor) -> None:
    calls.add_(1)


def test_what_eager_code_behind_a_graph_break_writes_stays() -> None:
    calls = torch.zeros(())

    def model(x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(1)
        count_eagerly(calls)
        return x * 2 + seen.sum()

    run = torch.compile(model, backend="dsv4_piecewise", dynamic=True)
    seen = torch.zeros(3)
    dsv4_compile.capture(run, lambda n: (torch.ones(n, 4), seen), [4, 8])
    assert (calls.item(), seen.sum().item()) == (2 * 2, 0)


class Generators:
    """The random states of CUDA devices, which need not be there, and what was asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, devices: int, current: int) -> None:
        self.states = [0] * devices
        self.saved: list[torch.device] = []
        monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.get)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def get(self, device: torch.device) -> int:
        self.saved.append(device)
        return self.states[device.index]

    def set(self, state: int, device: torch.device) -> None:
        self.states[device.index] = state


def test_random_states_of_the_devices_in_use_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current one and those of the graphs; another thread may draw on the others. torch does not warn."""
    generators = Generators(monkeypatch, devices=3, current=1)
    graphs: Any = SimpleNamespace(inputs=(), written=frozenset)
    with RestoringCalls():
        generators.states = [0, 1, 1]  # as of dummy inputs
        for name in ("cuda:0", "cuda", "cuda:0", "cpu"):
            graphs.device = torch.device(name)
            with RestoredInputs(graphs, ()):
                generators.states = [state + 1 for state in generators.states]
    assert generators.states == [0, 0, 5]
    assert generators.saved == [torch.device("cuda", 1), torch.device("cuda", 0)]


def test_where_cuda_has_not_started_it_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Generators(monkeypatch, devices=0, current=0)
    with RestoringCalls():
        pass
    assert generators.saved == []


@pytest.mark.parametrize("engine", ["off", "host"])
def test_what_a_call_writes_is_copied_once(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each kind of call: caches may be as large as the device allows, and so is a copy of them."""
    _, run = compiled(engine)
    seen, copies = torch.zeros(3), []
    clone = Tensor.clone

    def watched(self: Tensor, **options: Any) -> Tensor:
        if self.data_ptr() == seen.data_ptr():
            copies.append(self)
        return clone(self, **options)

    monkeypatch.setattr(Tensor, "clone", watched)
    with torch.no_grad(), RestoringCalls() as restored:
        for calls in (1, 2, 3):  # warm-up, capture, replay
            run(torch.ones(4, 4), seen)
            assert restored.calls == len(copies) == calls
    assert seen.sum() == 0


def test_largest_first_and_then_every_call_replays() -> None:
    _, run = compiled("host")
    order: list[int] = []

    def inputs_for(n: int) -> dict[str, Tensor]:
        order.append(n)
        return {"x": torch.ones(n, 4), "seen": seen}

    seen = torch.zeros(3)
    with dsv4_compile.counters.expect(captures=3, uncaptured_calls=3):
        dsv4_compile.capture(run, inputs_for, [4, 16, 8, 4])
    assert order == [16, 8, 4]
    with torch.no_grad(), dsv4_compile.counters.expect(replays=3, captures=0, uncaptured_calls=0):
        for n in (8, 4, 16):
            run(torch.ones(n, 4), seen)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_model_that_is_not_compiled_by_this_backend_is_refused(backend: str | None) -> None:
    model = Cached()
    run = model if backend is None else torch.compile(model, backend=backend)
    with pytest.raises(CaptureError, match="ran nothing that dsv4_piecewise compiled"):
        dsv4_compile.capture(run, lambda n: (torch.ones(n, 4), torch.zeros(3)), [4])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (3, "sizes is 3; it must be a list of token counts"),
        (None, "sizes is None; it must be"),
        ("16", "sizes has '1'; a token count is"),
        ([4, 0], "sizes has 0; a token count is an integer of at least 1"),
        ([4.0], "sizes has 4.0; "),
        ([True], "sizes has True; "),
    ],
)
def test_sizes_that_are_no_token_counts_are_refused_before_any_call(sizes: Any, message: str) -> None:
    _, run = compiled("host")
    calls: list[int] = []
    with pytest.raises(ArgumentError, match=message):
        dsv4_compile.capture(run, calls.append, sizes)
    assert calls == []


def test_arguments_in_the_wrong_order_are_refused() -> None:
    _, run = compiled("host")
    with pytest.raises(
        ArgumentError, match=r"inputs_for is \[4\], which cannot be called; the order is compiled, inputs_for"
    ):
        dsv4_compile.capture(run, [4], lambda n: ())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="compiled is None, which cannot be called"):
        dsv4_compile.capture(None, lambda n: (), [4])  # type: ignore[arg-type]


def test_a_size_that_is_that_of_another_dim_is_captured_where_it_is_served() -> None:
    """Dynamo takes equal sizes for one at first; the graph of the sizes to come then serves that size as well."""
    model = nn.Linear(64, 64, bias=False)
    run = torch.compile(model, backend="dsv4_piecewise", dynamic=True)
    dsv4_compile.capture(run, lambda n: torch.randn(n, 64), [64, 32, 16])
    with torch.no_grad(), dsv4_compile.counters.expect(graphs_compiled=0, captures=0, uncaptured_calls=0, replays=3):
        for n in (64, 32, 16):
            x = torch.randn(n, 64)
            torch.testing.assert_close(run(x), model(x))


def test_a_failing_dummy_call_is_undone_too() -> None:
    model, run = compiled("host")
    with pytest.raises(RuntimeError, match="size"):
        dsv4_compile.capture(run, lambda n: (torch.ones(n, 5), torch.zeros(3)), [4])
    assert model.cache.sum() == 0


def test_capture_ahead_leaves_written_inputs_and_randomness_alone() -> None:
    def f(x: Tensor, cache: Tensor, out: Tensor) -> Tensor:
        cache[: x.shape[0]].add_(x + torch.rand(4))
        toy.attn(x, out[: x.shape[0]])
        return toy.fresh(x) + cache.sum()

    compiled = compile_host(f)
    cache, out = static(torch.randn(16, 4)), static(torch.randn(16, 4))
    before = cache.clone(), out.clone(), torch.get_rng_state()
    dummy = {n: torch.full((n, 4), float("nan")) for n in (5, 6, 7)}
    with counters.expect(captures=3, uncaptured_calls=3):
        dsv4_compile.capture(compiled, lambda n: (dummy[n], cache, out), sizes=(6, 5, 7), progress=False)
    assert torch.equal(cache, before[0])
    assert torch.equal(out, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert all(tensor.isnan().all() for tensor in dummy.values())
    pair = Pair(f, HOST)
    pair.compiled = compiled
    with counters.expect(captures=0, uncaptured_calls=0, replays=3):
        for n in (5, 6, 7):
            pair(rows(n), cache, out)


def test_capture_ahead_without_an_engine_leaves_no_trace_either() -> None:
    compiled = compile_host(accumulate, engine="off")
    cache = static(torch.zeros(16, 4))
    dsv4_compile.capture(compiled, lambda n: (rows(n), cache), sizes=(5, 6), progress=False)
    assert not cache.any()


def test_capture_ahead_goes_from_the_largest_to_the_smallest() -> None:
    seen = []
    compiled = compile_host(lambda x: toy.fresh(x) + 1)
    dsv4_compile.capture(compiled, lambda n: seen.append(n) or {"x": rows(n)}, sizes=[5, 7, 6, 5], progress=False)
    assert seen == [7, 6, 5]


def test_capture_ahead_that_fails_leaves_no_trace_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        out = torch.empty_like(x)
        toy.hook(x, out)
        return out + cache.sum()

    def fail(q: Tensor) -> Tensor:
        raise KeyError("on purpose")

    compiled = compile_host(f, split_ops=("toy::hook",))
    cache = static(torch.zeros(4))
    monkeypatch.setattr(Host, "function", staticmethod(fail))
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="on purpose"):
        dsv4_compile.capture(compiled, lambda n: (rows(n), cache), sizes=(5,), progress=False)
    assert not cache.any()
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.undo()
    with torch.no_grad():
        for count in range(1, 4):
            x = rows(5)
            assert torch.equal(compiled(x, cache), 2 * x + 4 * count)  # writes are kept again
