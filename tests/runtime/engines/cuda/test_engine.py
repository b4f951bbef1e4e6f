"""The cuda engine keeps the rules of capture: the examples that the host engine keeps, and whole programs, on a GPU."""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_examples import EXAMPLES
from engine_streams import EXAMPLES as STREAMS
from engine_surroundings import EXAMPLES as SURROUNDINGS
from runtime_helpers import SPLIT_PROBES
from torch import Tensor, nn

from dsv4_compile import counters
from dsv4_compile.backend import dsv4_piecewise
from dsv4_compile.runtime.engines.select import engine_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    # what Inductor and Triton warn of on a GPU is not ours to change
    pytest.mark.filterwarnings("default"),
]


RULES = EXAMPLES | SURROUNDINGS | STREAMS
DEVICE = "cuda"
WIDTH = 64
STREAMS_OF_NODES = (0, 1, 2, 0, 3)  # the products lie on streams of their own, whatever they weigh
ASSIGN_STREAMS = importlib.import_module("dsv4_compile.passes.assign_streams")
probe = torch.ops.probe


def engine() -> Any:
    return engine_for("cuda", torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    RULES[name](engine())


class Branches(nn.Module):
    """Three branches from one product, one of which writes a cache; then a split op, another product and a draw."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 8, requires_grad=False)
        self.register_buffer("cache", torch.zeros(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        a = (h @ self.w).sin()
        b = (h @ self.w.T).cos()
        c = h * 2
        probe.store(c, self.cache)
        result: Tensor = probe.give(a + b + c) @ self.w + self.cache.sum(0)
        return result + torch.rand_like(result)


def _schedule(before: Sequence[object], weights: Sequence[int], side_streams: int) -> tuple[int, ...]:
    return (*STREAMS_OF_NODES, *[0] * len(before))[: len(before)] if side_streams else (0,) * len(before)


class Trial:
    """A compiled model and its copy, which runs eagerly."""

    def __init__(self, **options: Any) -> None:
        self.model = Branches().to(DEVICE)
        self.eager = copy.deepcopy(self.model)
        options = {"split_ops": SPLIT_PROBES, "aux_streams": 3, **options}
        # by itself and not by its name, which torch finds only if the package is installed
        self._compiled = torch.compile(self.model, backend=dsv4_piecewise, dynamic=True, options=options)

    @torch.no_grad()
    def call(self, tokens: int) -> None:
        """Call both, and compare what they give, the cache, and the numbers that are drawn next."""
        x, found = torch.randn(tokens, WIDTH, device=DEVICE), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ASSIGN_STREAMS, "schedule", _schedule)
            for model in (self._compiled, self.eager):
                torch.manual_seed(tokens)
                found.append((model(x).clone(), torch.rand(2, device=DEVICE)))
        torch.testing.assert_close((*found[0], self.model.cache), (*found[1], self.eager.cache), rtol=1e-4, atol=1e-4)


OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "eager": {"piece_compiler": "eager"},
    "aot_eager": {"piece_compiler": "aot_eager"},
    "one stream": {"aux_streams": 0},
    "mrv1": {"runner": "mrv1"},
    "pools and outputs": {"pool": "bucket", "static_outputs": True},
    "full check": {"check": "full"},
    "bound": {"max_tokens": 16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_programs_are_as_eager(name):
    trial = Trial(**OPTIONS[name])
    for tokens in (9, 5, 9, 5):  # warm-up, then capture
        trial.call(tokens)
    with counters.expect(replays=8, captures=0, recaptures=0, uncaptured_calls=0):
        for tokens in (9, 5) * 4:
            trial.call(tokens)


def test_a_caller_on_a_stream_of_its_own():
    trial = Trial()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(5):
            trial.call(7)
    torch.cuda.synchronize()


def test_weights_that_move_are_captured_again():
    """With the only program of a pool goes the pool."""
    trial = Trial()
    for _ in range(3):
        trial.call(7)
    for captures in (1, 1):
        trial.model.w.data = trial.model.w.data.clone()
        with counters.expect(recaptures=captures, replays=3):
            for _ in range(3):
                trial.call(7)


def test_another_thread_captures_what_this_one_warmed_up():
    trial, failures = Trial(), []
    trial.call(7)

    def capture() -> None:
        try:
            for _ in range(3):
                trial.call(7)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    assert failures == []
    trial.call(7)


def test_a_graph_that_goes_leaves_the_cublas_workspaces_of_others():
    """So long a sum is split between blocks, which meet in a workspace."""
    long = 1 << 15
    x, w = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in ((8, long), (long, WIDTH)))
    out, expected = (torch.zeros(8, WIDTH, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    expected.copy_(x @ w)
    pool = engine().make_pool()
    engine().warm_up(lambda: out.copy_(x @ w))
    kept, gone = (engine().capture(lambda: out.copy_(x @ w), pool, name=name) for name in ("kept", "gone"))
    gone.release()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    out.zero_()
    kept.replay()
    torch.testing.assert_close(out, expected)
