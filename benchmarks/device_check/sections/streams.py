"""S7: side streams: their gain, apart from what they cost, since a piece with streams is cut for Inductor.

Captured decode steps of two C4A layers, whose pieces have independent branches, for eager pieces (nothing is lost to
cuts there) and for compiled ones, with the dims of both released models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dsv4_compile.models.deepseek_v4 import AttentionStack

from ..bench import Bench
from ..hole import light_ops
from ..models import Batches, Inputs, compiled, config_of, draw_stack, inductor_of, many_recompiles, step_in_place
from ..timing import Step, build, measure

RATIOS, DRY_RATIOS = (4, 4), (4,)
STREAMS, DRY_STREAMS = (0, 1, 2, 3), (0, 3)
TOKENS, DRY_TOKENS = (8, 64, 1, 256), (8,)
CONTEXT, DRY_CONTEXT = 512, 40
ORDER = (("flash", "inductor"), ("flash", "eager"), ("pro", "inductor"), ("pro", "eager"))
TOLERANCE = 0.1


def run(bench: Bench) -> None:
    """What matters most first: the time box may end the rest."""
    cells = len(ORDER) * len(bench.pick(TOKENS, DRY_TOKENS))
    seconds = bench.remaining() / cells / 2
    with light_ops(bench.device), many_recompiles():
        models = {dims: _model(bench, dims) for dims in bench.pick(("flash", "pro"), ("flash",))}
        for dims, compiler in ORDER:
            if dims not in models:
                continue
            for tokens in bench.pick(TOKENS, DRY_TOKENS):
                model, batches = models[dims]
                inputs = batches.decode(tokens, bench.pick(CONTEXT, DRY_CONTEXT))
                _compare(bench, model, inputs, seconds, dims=dims, compiler=compiler, tokens=tokens)


def fill_caches(bench: Bench) -> None:
    """Compile what the section will."""
    model, batches = _model(bench, "flash")
    with light_ops(bench.device), many_recompiles(), torch.no_grad():
        for streams in (0, 3):
            with bench.attempt(filling="streams", aux=streams):
                call = compiled(model, runner="mrv2", aux_streams=streams, engine="off", piece_compiler="inductor")
                step_in_place(call, batches.decode(8, CONTEXT))()


def _compare(bench: Bench, model: AttentionStack, inputs: Inputs, seconds: float, **case: Any) -> None:
    rows: dict[str, Callable[[], Step]] = {
        f"{streams} side streams": partial(_step, bench, model, inputs, streams, case["compiler"])
        for streams in bench.pick(STREAMS, DRY_STREAMS)
    }
    medians = measure(bench, build(bench, rows, TOLERANCE, **case), seconds, **case)
    none = medians.get("0 side streams")
    for name, found in medians.items():
        metric = "gpu_us" if "gpu_us" in found else "wall_us"
        if none is not None:
            bench.row("of_no_side_stream", found[metric] / none[metric], config=name, by=metric, **case)


def _step(bench: Bench, model: AttentionStack, inputs: Inputs, streams: int, compiler: str) -> Step:
    name = inductor_of(bench) if compiler == "inductor" else compiler
    return step_in_place(compiled(model, runner="mrv2", aux_streams=streams, piece_compiler=name), inputs)


def _model(bench: Bench, dims: str) -> tuple[AttentionStack, Batches]:
    model = draw_stack(bench, config_of(bench, bench.pick(RATIOS, DRY_RATIOS), dims=dims, max_len=1024))
    most = max(bench.pick(TOKENS, DRY_TOKENS))
    return model, Batches(model, requests=most, max_len=bench.pick(CONTEXT, DRY_CONTEXT) + 8)
