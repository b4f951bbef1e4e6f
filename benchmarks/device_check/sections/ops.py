"""S11: the kernels one by one, beside their rooflines and beside the ops in torch, at the dims of the Flash model.

`python -m benchmarks.ops` has more sizes, and the larger model. In a dry run, where there is no GPU, nothing is timed:
the rows are the rooflines, and one of them says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dsv4_compile.ops.kernels.serve import KERNELS_SERVE, NO_TRITON

from ...kernel_cases import PREFILL_TOKENS, Case
from ...ops import AIMED_AT, aim_of, cases, time_case, work_of
from ..bench import Bench

MODEL, TOKENS, CONTEXTS = "Flash", 64, (1024, 32768)
HOT_TOKENS = (1, TOKENS, PREFILL_TOKENS)  # of the kernels that there is an aim for
SECONDS = 0.06  # of measuring a step
LEAST = 6.0  # seconds that a case may take: its kernels are compiled in it


def run(bench: Bench) -> None:
    """Every case that there is time for."""
    chosen = list(chosen_cases())
    if bench.device != "cuda":
        bench.row("outcome", "nothing was timed: there is no GPU", what="kernels")
    elif not KERNELS_SERVE:
        bench.row("outcome", NO_TRITON, expected="kernels", what="kernels")
    for number, case in enumerate(chosen):
        if bench.remaining() < LEAST:
            bench.row("outcome", f"no time for {len(chosen) - number} of {len(chosen)} cases", what="kernels")
            return
        with bench.attempt(**named(case)):
            _write(bench, case)


def chosen_cases() -> Iterator[Case]:
    """Each op in each cache format; more of those that the whole step waits for."""
    for case in cases(quick=False):
        tokens = HOT_TOKENS if case.op in AIMED_AT else (TOKENS,)
        if case.model == MODEL and case.tokens in tokens and case.context in CONTEXTS:
            yield case


def named(case: Case) -> dict[str, Any]:
    """A case in a row."""
    return {
        "op": case.op,
        "variant": case.variant,
        "format": case.cache_format,
        "tokens": case.tokens,
        "context": case.context,
    }


def _write(bench: Bench, case: Case) -> None:
    roofline = work_of(case).seconds
    bench.row("roofline_us", roofline * 1e6, **named(case))
    if bench.device != "cuda" or not KERNELS_SERVE:
        return
    seconds = time_case(case, SECONDS)
    torch.cuda.empty_cache()  # caches of a case are larger than what S8 has left
    of_roofline, aim = seconds["kernel"] / roofline, aim_of(case)
    bench.row("us", seconds["kernel"] * 1e6, **named(case))
    bench.row("of_torch", seconds["kernel"] / seconds["torch"], **named(case))
    if aim is None:
        bench.row("of_roofline", of_roofline, **named(case))
    else:
        bench.row("of_roofline", of_roofline, expected=f"at most {aim}", ok=of_roofline <= aim, **named(case))
