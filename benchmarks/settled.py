"""Steps that compile and capture nothing any more: only those have a time worth comparing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv4_compile import counters

from .measure import Steps, measure


@torch.no_grad()
def launches_of_a_replay(step: Callable[[], object]) -> int:
    """Warm up, capture, replay once; the ops that this replay launched by hand."""
    for _ in range(2):
        step()
    before = counters.eager_op_calls
    with counters.expect(replays=1, captures=0, uncaptured_calls=0):
        step()
    return counters.eager_op_calls - before


def measure_settled(steps: Steps, seconds: float, device: str) -> dict[str, float]:
    """As `measure`.

    Raises:
        AssertionError: something was compiled or captured meanwhile, so the times are not those of replays.
    """
    with counters.expect(graphs_compiled=0, captures=0, recaptures=0):
        return measure(steps, seconds, device)
