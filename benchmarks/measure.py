"""Times of steps to compare: all in one process and in turns, so that a slow moment of the machine meets all.

On the CPU it is processor time of one thread, which other work on the machine moves less than time on the wall; on a
GPU it is time on the wall until the device is done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.utils.benchmark import Timer, timer

Steps = Mapping[str, Callable[[], object]]


def measure(steps: Steps, seconds: float, device: str = "cpu", rounds: int = 5) -> dict[str, float]:
    """Time each step for so many seconds in all.

    Args:
        steps: what is compared; each call does one step.
        seconds: measuring time of each.
        device: where the steps run.
        rounds: how often each has its turn.

    Returns:
        Seconds of one call of each: the median over the rounds of the rounds' medians.
    """
    clock = time.process_time if device == "cpu" else timer
    times: dict[str, list[float]] = {name: [] for name in steps}
    with torch.no_grad():
        for _ in range(rounds):
            for name, step in steps.items():
                timed = Timer("step()", timer=clock, globals={"step": step}, num_threads=torch.get_num_threads())
                times[name].append(timed.blocked_autorange(min_run_time=seconds / rounds).median)
    return {name: statistics.median(taken) for name, taken in times.items()}
