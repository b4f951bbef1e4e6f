"""Times of steps to compare: all in one process and in turns, so that a slow moment of the machine meets all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from torch.utils.benchmark import Timer

Steps = Mapping[str, Callable[[], object]]


def measure(steps: Steps, seconds: float, rounds: int = 5) -> dict[str, float]:
    """Time each step for so many seconds in all.

    Args:
        steps: what is compared; each call does one step.
        seconds: measuring time of each.
        rounds: how often each has its turn.

    Returns:
        Seconds of one call of each: the median over the rounds of the rounds' medians.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    with torch.no_grad():
        for _ in range(rounds):
            for name, step in steps.items():
                timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
                times[name].append(timer.blocked_autorange(min_run_time=seconds / rounds).median)
    return {name: statistics.median(taken) for name, taken in times.items()}
