"""S10: what tools say that look from outside: a sanitizer, torch's profiler twice, and one trace of a decode step."""

from __future__ import annotations

import gzip
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dsv4_compile import counters

from ..bench import Bench
from ..hole import light_ops
from ..models import FLASH_RATIOS, Batches, compiled, config_of, draw_stack, inductor_of, step_in_place
from ..timing import Step, synchronise

SANITIZER = "compute-sanitizer"
TRACE = "decode_trace.json.gz"
LARGEST_TRACE = 8 << 20  # bytes: what comes back from a lent machine is limited


def run(bench: Bench) -> None:
    """The trace first: it is what one looks at."""
    with light_ops(bench.device):
        step, pieces = _captured_step(bench, streams=0)
        for number in (1, 2):
            with bench.attempt(tool=f"profiler, time {number}"):
                _profile(bench, step, pieces, number)
    _sanitize(bench)


def streams_example(bench: Bench) -> None:
    """A captured step with side streams, small, for a sanitizer that makes everything slow."""
    with light_ops(bench.device):
        step, _ = _captured_step(bench, streams=3)
        for _ in range(3):
            step()
        synchronise(bench.device)


@torch.no_grad()
def _captured_step(bench: Bench, streams: int) -> tuple[Step, int]:
    """A step that replays, and how many graphs it does."""
    small = streams > 0 or bench.dry
    model = draw_stack(bench, config_of(bench, (4,) if small else FLASH_RATIOS))
    inputs = Batches(model, requests=8, max_len=64).decode(8, 40)
    before = counters.pieces_compiled + counters.pieces_reused
    compiler = "eager" if streams else inductor_of(bench)
    call = compiled(model, runner="mrv2", aux_streams=streams, piece_compiler=compiler)
    step = step_in_place(call, inputs)

    def run() -> object:
        with torch.no_grad():
            return step()

    for _ in range(3):
        run()
    synchronise(bench.device)
    return run, counters.pieces_compiled + counters.pieces_reused - before


def _profile(bench: Bench, step: Step, pieces: int, number: int) -> None:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.device == "cuda" else [])]
    with profile(activities=activities) as found:
        for _ in range(3):
            step()
        synchronise(bench.device)
    names: Counter[str] = Counter(event.name for event in found.events())
    tool: dict[str, Any] = {"tool": f"profiler, time {number}"}
    if bench.device == "cuda":
        bench.row(
            "outcome", f"{names['cudaGraphLaunch']} graph launches", expected=f"{3 * pieces} graph launches", **tool
        )
    else:
        bench.row("outcome", f"{sum(names.values())} events", **tool)
    if number == 1:
        _keep_trace(bench, found)


def _keep_trace(bench: Bench, found: Any) -> None:
    path = bench.out / "decode_trace.json"
    found.export_chrome_trace(str(path))
    kept = bench.out / TRACE
    with path.open("rb") as source, gzip.open(kept, "wb") as target:
        shutil.copyfileobj(source, target)
    path.unlink()
    size = kept.stat().st_size
    if size > LARGEST_TRACE:
        kept.unlink()
    bench.row(
        "outcome", f"{TRACE}, {size} bytes" if size <= LARGEST_TRACE else f"{size} bytes: too large", tool="trace"
    )


def _sanitize(bench: Bench) -> None:
    entry = f"{__name__}:streams_example"
    found = shutil.which(SANITIZER) or _beside_the_compiler()
    if bench.device != "cuda" or found is None:
        bench.row("outcome", "not here: it ran without", tool=SANITIZER)
        bench.apart(entry, bench.remaining() - 3)
        return
    prefix = (found, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    clean = bench.in_process(entry, bench.remaining() - 3, prefix=prefix, tool=SANITIZER)
    bench.row("outcome", "no error" if clean else "see the error row", expected="no error", tool=SANITIZER)


def _beside_the_compiler() -> str | None:
    path = Path("/usr/local/cuda/bin", SANITIZER)
    return str(path) if path.is_file() else None
