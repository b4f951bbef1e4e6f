"""S8: what captured sizes cost in memory: by pool, by size, by graph, and what is given back.

The device is asked how much is in use (`mem_get_info`), which has everything in it; torch, how much it has reserved,
and how much of that lies in the pools of graphs (by the pool of each segment). What the device has beyond torch is what
CUDA keeps for graphs. Beside that: scratch of cuBLAS, and what a warm-up leaves in the cache. On the CPU, where a dry
run only shows that this works, bytes are counted at the engine.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

import dsv4_compile
from dsv4_compile import counters
from dsv4_compile.runtime.engines.select import engine_for

from ...memory import Allocations, counted_allocations
from ..bench import Bench
from ..hole import light_ops
from ..models import (
    FLASH_RATIOS,
    Batches,
    Inputs,
    compiled,
    config_of,
    draw_stack,
    inductor_of,
    many_recompiles,
    tensors_of,
)

STEPS, DRY_STEPS = (1, 2, 4, 8, 16, 32), (1, 2)
LAYERS = 4
Figures = dict[str, int]


def run(bench: Bench) -> None:
    """Scratch first, since later captures have it too; then both kinds of pool."""
    with bench.attempt(what="scratch"):
        _scratch(bench)
    with light_ops(bench.device), many_recompiles():
        for pool in ("shared", "bucket"):
            with bench.attempt(pool=pool):
                _by_bucket(bench, pool)


def _scratch(bench: Bench) -> None:
    """What cuBLAS keeps for the stream of the work, and for three side streams."""
    if bench.device == "cuda":
        torch.ones(8, 8, device=bench.device) @ torch.ones(8, 8, device=bench.device)
    engine = engine_for("auto", torch.device(bench.device))
    for streams, what in ((0, "scratch of cuBLAS for one stream"), (3, "scratch of cuBLAS for three side streams")):
        before = _in_use(bench)
        engine.warm_up(lambda: None, streams=streams)
        bench.row("bytes", _in_use(bench)["device_bytes"] - before["device_bytes"], what=what)


def _by_bucket(bench: Bench, pool: str) -> None:
    """Capture ever more sizes, the largest first, and look after 1, 2, 4, ... of them."""
    torch._dynamo.reset()
    most = max(bench.pick(STEPS, DRY_STEPS))
    sizes = [8 * number for number in range(most, 0, -1)]
    model = draw_stack(bench, config_of(bench, bench.pick(FLASH_RATIOS[2 : 2 + LAYERS], (0,))))
    batches = Batches(model, requests=max(sizes), max_len=bench.pick(520, 48))
    options: dict[str, Any] = {"runner": "mrv2", "pool": pool, "capture_sizes": sizes}
    call = compiled(model, piece_compiler=inductor_of(bench), **options)
    inputs = {size: _marked(batches.decode(size, bench.pick(512, 40))) for size in sizes}
    with torch.no_grad(), counted_allocations(engine_for("auto", torch.device(bench.device))) as counted:
        before = counters.pieces_compiled + counters.pieces_reused
        call(*inputs[sizes[0]])
        pieces = counters.pieces_compiled + counters.pieces_reused - before
        if bench.device == "cuda":
            bench.row("bytes", _left_of_warm_ups(), what=f"cached for warm-ups after the first call, {pool}")
        start = _in_use(bench, counted)
        found: dict[int, Figures] = {}
        for number, size in enumerate(sizes, 1):
            dsv4_compile.capture(call, lambda size: inputs[size], [size], progress=False)
            if number in bench.pick(STEPS, DRY_STEPS):
                found[number] = _in_use(bench, counted)
                _write(bench, found[number], start, pool=pool, buckets=number)
        _write_slopes(bench, found, pool, pieces)
        _given_back(bench, counted, pool)


def _marked(inputs: Inputs) -> Inputs:
    for tensor in tensors_of(inputs):
        torch._dynamo.mark_static_address(tensor)
    return inputs


def _write(bench: Bench, figures: Figures, start: Figures, **case: Any) -> None:
    for metric, value in figures.items():
        bench.row(metric, value - start[metric], **case)


def _write_slopes(bench: Bench, found: dict[int, Figures], pool: str, pieces: int) -> None:
    """Of one more size all that is in use; of one more graph what is in use beyond torch."""
    low, high = min(found), max(found)
    per_bucket = (found[high]["device_bytes"] - found[low]["device_bytes"]) / (high - low)
    bench.row("bytes_per_bucket", per_bucket, pool=pool, buckets=f"{low} to {high}")
    beyond = {number: figures["device_bytes"] - figures["reserved_bytes"] for number, figures in found.items()}
    per_graph = (beyond[high] - beyond[low]) / (high - low) / max(pieces, 1)
    bench.row("bytes_per_graph", per_graph, pool=pool, graphs_of_a_bucket=pieces)


def _given_back(bench: Bench, counted: Allocations, pool: str) -> None:
    """What `torch._dynamo.reset` gives to torch, and what emptying the cache gives to the device."""
    before = _in_use(bench, counted)["device_bytes"]
    torch._dynamo.reset()
    gc.collect()
    after_reset = _in_use(bench, counted, empties=False)["device_bytes"]
    after_emptying = _in_use(bench, counted)["device_bytes"]
    bench.row("bytes", before - after_reset, what=f"given back by reset, {pool}")
    bench.row("bytes", after_reset - after_emptying, what=f"given back by emptying the cache, {pool}")


def _in_use(bench: Bench, counted: Allocations | None = None, *, empties: bool = True) -> Figures:
    if bench.device != "cuda":
        lasting = 0 if counted is None else counted.lasting
        pooled = 0 if counted is None else counted.pooled(torch.device("cpu"))
        return {"device_bytes": lasting + pooled, "reserved_bytes": 0, "pool_bytes": pooled, "lasting_bytes": lasting}
    gc.collect()
    torch.cuda.synchronize()
    if empties:
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {
        "device_bytes": total - free,
        "reserved_bytes": torch.cuda.memory_reserved(),
        "pool_bytes": sum(_size(segment) for segment in _segments() if _pool_of(segment) != (0, 0)),
        "lasting_bytes": 0 if counted is None else counted.lasting,
    }


def _left_of_warm_ups() -> int:
    """Bytes in torch's cache that belong to the engine's own stream and that nobody uses."""
    engine: Any = engine_for("auto", torch.device("cuda"))
    stream = engine._stream.cuda_stream
    ours = [segment for segment in _segments() if segment.get("stream") == stream and _pool_of(segment) == (0, 0)]
    return sum(_size(segment) - int(segment.get("allocated_size", 0)) for segment in ours)


def _segments() -> list[dict[str, Any]]:
    return list(torch.cuda.memory_snapshot())


def _size(segment: dict[str, Any]) -> int:
    return int(segment.get("total_size", 0))


def _pool_of(segment: dict[str, Any]) -> tuple[int, ...]:
    return tuple(segment.get("segment_pool_id", (0, 0)))
