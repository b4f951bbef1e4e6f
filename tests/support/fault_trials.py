"""Calls that fail at a chosen place, and what must be as before afterwards."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from case_helpers import rows
from fault_points import Events, InjectedError, InjectedInterrupt
from runtime_helpers import compile_host, live_bytes, the_owner
from torch import Tensor, nn

import dsv4_compile

probe = torch.ops.probe


class Model(nn.Module):
    """Two regions between three pieces; it writes a cache from a piece, and has autocast around one op."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)
        self.register_buffer("cache", torch.randn(16, 4, generator=generator))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = probe.shift(x @ self.w)
        probe.store(h, self.cache)
        out = torch.empty_like(h)
        probe.core(h, out)
        both = probe.shift(out) + h
        left, right = both[:, :2], both[:, 2:]
        with torch.autocast("cpu", torch.bfloat16):
            y = probe.give(left) @ self.w[:2]
        return y + right.sum(), self.cache[: x.shape[0]], left


class Trial:
    """A model compiled, and its eager model, that go through the same calls."""

    def __init__(self, **options: Any) -> None:
        self.model = Model()
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.compiled = compile_host(self.model, **options)
        self.call()
        self.owner = None if options.get("engine") == "off" else the_owner()

    def call(self, n: int = 5) -> None:
        """One call that must be right."""
        x, eager = rows(n), copy.deepcopy(self.model)
        with torch.no_grad():
            wanted, results = eager(x), self.compiled(x)
        assert all(map(torch.equal, results, wanted))
        assert torch.equal(self.model.cache, eager.cache)

    def begin_again(self) -> None:
        """Nothing captured, nothing warm, and the first weights and caches."""
        self.release()
        self.model.load_state_dict(self.start)

    def release(self) -> None:
        """Nothing captured, nothing warm."""
        if self.owner is not None:
            self.owner.release()

    def num_captured(self) -> int:
        """Buckets that are captured with the weights and caches of now."""
        addresses = {self.model.w.data_ptr(), self.model.cache.data_ptr()}
        return sum(set(entry.parameter_addresses) == addresses for entry in self.owner._cache._programs.values())

    def memory(self) -> tuple[int, int]:
        """Bytes that are alive, and those of the pool, after one clean capture."""
        self.begin_again()
        for _ in range(3):
            self.call()
        return live_bytes(), self.owner._pool.nbytes

    def move_weight(self) -> None:
        self.model.w.data = self.model.w.data.clone()


PHASES: dict[str, tuple[Callable[[Trial], object], dict[str, int]]] = {
    # what to do before the call that fails; what the three calls after it have to count
    "warm-up": (lambda trial: None, {"uncaptured_calls": 1, "captures": 1, "recaptures": 0, "replays": 2}),
    "capture": (lambda trial: trial.call(), {"uncaptured_calls": 0, "captures": 1, "recaptures": 0, "replays": 3}),
    "replay": (
        lambda trial: [trial.call() for _ in range(2)],
        {"uncaptured_calls": 0, "captures": 0, "recaptures": 0, "replays": 3},
    ),
    "recapture": (
        lambda trial: [trial.call(), trial.call(), trial.move_weight()],
        {"uncaptured_calls": 0, "captures": 1, "recaptures": 1, "replays": 3},
    ),
}


def global_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        gc.isenabled(),
        dsv4_compile.is_capturing(),
        torch.get_rng_state().tolist(),
    )


@contextmanager
def collector(enabled: bool) -> Iterator[None]:
    """The garbage collector as some caller may have set it."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if before else gc.disable)()


def fail_at(trial: Trial, events: Events, point: int) -> str:
    """Let the call fail at one of its events; returns the place. Raises what should not happen."""
    x = rows(5)
    with collector(enabled=point % 2 == 0), torch.no_grad():
        before = global_state()
        events.arm(point)
        with pytest.raises((InjectedError, InjectedInterrupt)) as caught:
            trial.compiled(x)
        events.stop()
        assert caught.value is events.raised
        events.raised = None  # with its traceback go the values of the call
        assert global_state() == before
    return events.seen[-1]


# A full check runs each piece a second time; the arena is locked; each bucket has a pool; outputs have buffers.
UNUSUAL = {"check": "full", "max_tokens": 16, "pool": "bucket", "static_outputs": True}


def places_of(trial: Trial, events: Events, prepare: Callable[[Trial], object]) -> list[str]:
    """Everything at which the call that `prepare` prepares for can fail."""
    trial.begin_again()
    prepare(trial)
    events.watch()
    with torch.no_grad():
        trial.compiled(rows(5))
    events.stop()
    return list(events.seen)
