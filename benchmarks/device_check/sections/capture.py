"""S9: what it takes to get 61 layers ready: tracing, passes, pieces, warm-up, 62 captures; ten more sizes; letting go.

Tiny dims, and seconds on the wall, since that is what a server waits for. Inductor finds its kernels on disk: a few
layers with the same pieces are compiled before.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

import dsv4_compile
from dsv4_compile import backend as ours
from dsv4_compile import counters

from ...attention_stack import stack_and_inputs
from ..bench import Bench
from ..models import Inputs, inductor_of, many_recompiles
from ..timing import synchronise

LAYERS, DRY_LAYERS = 61, 3
MORE_SIZES = tuple(range(12, 32, 2))
PROFILED = ("capture_begin", "capture_end", "replay", "synchronize", "collect")


def run(bench: Bench) -> None:
    """Few layers for the caches, then all."""
    layers = bench.pick(LAYERS, DRY_LAYERS)
    with many_recompiles():
        if not bench.dry:
            _Stages(bench, 4).run(writes=False)
            torch._dynamo.reset()
        _Stages(bench, layers).run(writes=True)


class _Stages:
    """One model, and the seconds of each stage."""

    def __init__(self, bench: Bench, layers: int) -> None:
        self._bench, self._layers = bench, layers
        self._model, self._inputs = stack_and_inputs(layers, 32, bench.device)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._called: float | None = None
        self._call = torch.compile(self._model, backend=self._backend, dynamic=True)

    @torch.no_grad()
    def run(self, *, writes: bool) -> None:
        """All stages; few rows are lost if the time ends, since each is written when it is over."""
        before = counters.pieces_compiled + counters.pieces_reused
        self._first_call()
        pieces = counters.pieces_compiled + counters.pieces_reused - before
        if not writes:
            return
        for stage, seconds in self._seconds.items():
            self._row(stage, seconds)
        with self._garbage_seconds() as collected:
            self._timed("second call", lambda: self._call(*self._inputs))
        self._row("garbage collection in the second call", sum(collected))
        self._bench.row("captured_graphs", pieces, layers=self._layers)
        self._row("a piece in the second call", self._seconds["second call"] / max(pieces, 1))
        self._timed("third call, a replay", lambda: self._call(*self._inputs))
        with self._bench.attempt(stage="profile"):
            self._profile_another_size()
        sizes = self._bench.pick(MORE_SIZES, MORE_SIZES[:1])
        self._timed(
            f"{len(sizes)} more sizes",
            lambda: dsv4_compile.capture(self._call, self._inputs_of, sizes, progress=False),
        )
        self._timed("letting go of all", torch._dynamo.reset)

    def _first_call(self) -> None:
        with ExitStack() as stack:
            for name, stage in (("plan_graph", "passes"), ("compile_pieces", "pieces")):
                stack.enter_context(patch.object(ours, name, self._noting(getattr(ours, name), stage)))
            started = time.perf_counter()
            self._call(*self._inputs)
            synchronise(self._bench.device)
            ended = time.perf_counter()
        assert self._called is not None, "the backend was used"
        self._seconds["tracing"] = self._called - started - self._seconds["backend"]
        self._seconds["warm-up"] = ended - self._called
        self._seconds["first call"] = ended - started

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options = {"runner": "mrv2", "piece_compiler": inductor_of(self._bench)}
        compiled = self._noting(ours.dsv4_piecewise, "backend")(gm, example_inputs, options=options)

        def call(*args: Any) -> Any:
            self._called = self._called or time.perf_counter()
            return compiled(*args)

        return call

    def _noting(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def noted(*args: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self._seconds[stage] += time.perf_counter() - started

        return noted

    def _timed(self, stage: str, call: Callable[[], object]) -> None:
        synchronise(self._bench.device)
        self._noting(call, stage)()
        synchronise(self._bench.device)
        self._row(stage, self._seconds[stage])

    def _row(self, stage: str, seconds: float) -> None:
        self._bench.row("seconds", seconds, stage=stage, layers=self._layers)

    def _profile_another_size(self) -> None:
        """Where a capture's time goes: seconds of one more size, under a profiler that slows it down."""
        inputs = self._inputs_of(10)
        self._call(*inputs)
        profile = cProfile.Profile()
        profile.runcall(self._call, *inputs)
        spent: defaultdict[str, float] = defaultdict(float)
        for (_, _, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            spent["all"] += own
            for wanted in PROFILED:
                spent[wanted] += own if wanted in name else 0
        for name, seconds in spent.items():
            self._bench.row("profiled_seconds", seconds, function=name, layers=self._layers)

    @contextmanager
    def _garbage_seconds(self) -> Iterator[list[float]]:
        """Seconds of each collection inside of the block."""
        found: list[float] = []

        def note(phase: str, _: dict[str, int]) -> None:
            now = time.perf_counter()
            found.append(-now) if phase == "start" else found.__setitem__(-1, found[-1] + now)

        gc.callbacks.append(note)
        try:
            yield found
        finally:
            gc.callbacks.remove(note)

    def _inputs_of(self, tokens: int) -> Inputs:
        return stack_and_inputs(1, tokens, self._bench.device)[1]
