"""Times of steps that are compared: in one process, in turns, each in blocks between two synchronisations.

Of a step three figures are taken: `host_us`, until a call returns while the device has nothing to do, so that nobody
waits for it; `wall_us`, until the device is done, of calls one after another; `gpu_us`, what the device takes for them
when it never waits for the host, since it was kept busy until all calls were in its queue. On a CPU there is no third.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4_compile import counters

from .bench import Bench

Step = Callable[[], object]
Medians = dict[str, dict[str, float]]  # by name of the step and by metric

BLOCKS, LEAST_BLOCKS = 30, 3
BLOCK_S = 2e-3  # of calls in a block, about
CYCLES_OF_A_SECOND = 2_000_000_000  # more than any GPU has: keeping it busy for longer than needed costs only time
SETTLED = ("graphs_compiled", "captures", "recaptures")


@torch.no_grad()
def build(bench: Bench, builders: Mapping[str, Callable[[], Step]], tolerance: float, **case: Any) -> dict[str, Step]:
    """Make steps, call each until it is captured, and compare what it gives with what the first one does.

    One that fails, or gives something else, is a row and not among the results.

    Args:
        bench: where rows go.
        builders: by name; the first one is right by definition.
        tolerance: how far a value may be off, beside the largest value.
        case: of the rows.
    """
    steps: dict[str, Step] = {}
    expected: Tensor | None = None
    for name, make in builders.items():
        with bench.attempt(config=name, **case):
            step = make()
            for _ in range(3):  # warm-up, capture, replay
                result = step()
            if isinstance(result, Tensor):
                expected = result.clone() if expected is None else expected
                _compare(bench, result, expected, tolerance, config=name, **case)
            steps[name] = step
    return steps


def _compare(bench: Bench, result: Tensor, expected: Tensor, tolerance: float, **case: Any) -> None:
    error = (result.double() - expected.double()).abs().max().item()
    bound = tolerance * expected.double().abs().max().item()
    bench.row("max_abs_err", error, expected=f"at most {bound:.3g}", ok=error <= bound, **case)
    if not error <= bound:
        raise AssertionError(f"off by {error:.3g}, and the bound is {bound:.3g}: its time would mean nothing")


@torch.no_grad()
def measure(bench: Bench, steps: Mapping[str, Step], seconds: float, **case: Any) -> Medians:
    """Time steps that have been built, and write a row for each figure.

    Args:
        bench: where rows go.
        steps: by name.
        seconds: for all of them together, about.
        case: of the rows.
    """
    timers = {}
    for name, step in steps.items():
        with bench.attempt(config=name, **case):
            timers[name] = _Timer(step, bench.device, quick=bench.dry)
    until = time.perf_counter() + min(seconds, max(bench.remaining() - 3, 0))
    for block in range(bench.pick(BLOCKS, 2)):
        if block >= bench.pick(LEAST_BLOCKS, 1) and time.perf_counter() > until:
            break
        for name in list(timers):
            with bench.attempt(config=name, **case) as attempt:
                timers[name].take()
            if attempt.failed:
                del timers[name]
    return {name: _write(bench, name, timer, case) for name, timer in timers.items()}


def host_us(bench: Bench, steps: Mapping[str, Step], label: str, **case: Any) -> dict[str, float]:
    """Time on the host alone, for calls of some microseconds."""
    found = {}
    for name, step in steps.items():
        with bench.attempt(**{label: name}, **case):
            for _ in range(3):
                step()
            taken = []
            for _ in range(bench.pick(BLOCKS, 2)):
                synchronise(bench.device)
                started = time.perf_counter()
                for _ in range(20):
                    step()
                taken.append((time.perf_counter() - started) / 20 * 1e6)
            found[name] = statistics.median(taken)
            named: dict[str, Any] = {label: name, **case}
            bench.row("host_us", found[name], spread=spread(taken), n=len(taken), **named)
    synchronise(bench.device)
    return found


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The tenth and the ninetieth percentile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


class _Timer:
    """The blocks of one step.

    Args:
        step: what is timed.
        device: where it runs.
        quick: one call a block.

    Attributes:
        taken: the figures so far, by metric.
        changed: counts that a settled step leaves as they are.
    """

    def __init__(self, step: Step, device: str, *, quick: bool) -> None:
        self.step, self.device = step, device
        self.taken: defaultdict[str, list[float]] = defaultdict(list)
        self.changed: dict[str, int] = {}
        for _ in range(1 if quick else 3):
            step()
        synchronise(device)
        started = time.perf_counter()
        step()
        self._host = time.perf_counter() - started
        synchronise(device)
        once = time.perf_counter() - started
        self._calls = 1 if quick else max(1, min(50, int(BLOCK_S / once)))

    def take(self) -> None:
        """One block of each figure."""
        before = counters.snapshot()
        self._host_block()
        self._wall_block()
        if self.device == "cuda":
            self._gpu_block()
        after = counters.snapshot()
        self.changed.update({name: after[name] - before[name] for name in SETTLED if after[name] != before[name]})

    def _host_block(self) -> None:
        synchronise(self.device)
        started = time.perf_counter()
        self.step()
        self.taken["host_us"].append((time.perf_counter() - started) * 1e6)
        synchronise(self.device)

    def _wall_block(self) -> None:
        started = time.perf_counter()
        for _ in range(self._calls):
            self.step()
        synchronise(self.device)
        self.taken["wall_us"].append((time.perf_counter() - started) / self._calls * 1e6)

    def _gpu_block(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(int(min(1.2 * self._host * self._calls + 1e-4, 0.2) * CYCLES_OF_A_SECOND))
        start.record()
        for _ in range(self._calls):
            self.step()
        end.record()
        synchronise(self.device)
        self.taken["gpu_us"].append(start.elapsed_time(end) / self._calls * 1e3)


def _write(bench: Bench, name: str, timer: _Timer, case: Mapping[str, Any]) -> dict[str, float]:
    medians = {metric: statistics.median(values) for metric, values in timer.taken.items()}
    with bench.attempt(config=name, **case):
        if timer.changed:
            raise AssertionError(
                f"something was compiled or captured meanwhile, so these are no times: {timer.changed}"
            )
        for metric, values in timer.taken.items():
            bench.row(metric, medians[metric], spread=spread(values), n=len(values), config=name, **case)
    return medians
