"""Hazards of memory: workspaces that others clear, and a device that is full."""

from __future__ import annotations

import torch

from dsv4_compile.runtime.engines.select import engine_for

from ..bench import Bench
from ..hazard import Case, Finding, register_into, right
from ..timing import synchronise
from .hazard_cases import long_product

CASES: dict[str, Case] = {}


@register_into(CASES, "A4")
def workspaces_that_others_clear(bench: Bench) -> Finding:
    """a graph keeps its workspace when torch clears them all, as reduce-overhead does"""
    call, x, w = long_product(bench, 64)
    expected = call(x, w)
    synchronise(bench.device)
    if bench.device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    sentinel = [torch.full((bench.pick(1 << 26, 1 << 8),), 7.0, device=bench.device) for _ in range(4)]
    is_right = all(torch.equal(call(x, w), expected) for _ in range(3))
    intact = all(bool((part == 7).all()) for part in sentinel)
    return right(is_right and intact, f"results right: {is_right}, memory of others intact: {intact}")


@register_into(CASES, "B4")
def no_memory_while_capturing(bench: Bench) -> Finding:
    """a capture gets the memory that torch has cached for others"""
    x, out = torch.ones(bench.pick(1 << 26, 1 << 8), device=bench.device), torch.zeros(1, device=bench.device)
    engine = engine_for("auto", torch.device(bench.device))
    synchronise(bench.device)
    if bench.device == "cuda":
        torch.cuda.empty_cache()
        total, room = torch.cuda.mem_get_info()[1], 1 << 30
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
        torch.empty(room - (64 << 20), dtype=torch.uint8, device="cuda")  # cached, as soon as it is made
    try:
        graph = engine.capture(lambda: out.copy_((x * 2)[:1]), engine.make_pool(), name="one")
    finally:
        if bench.device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    graph.replay()
    return right(out.item() == 2)


@register_into(CASES, "B5")
def after_a_reset(bench: Bench) -> Finding:
    """memory of graphs is in torch's cache after a reset, and the device's after the cache was emptied"""
    call, x, w = long_product(bench, 64)
    call(x, w)
    synchronise(bench.device)
    torch._dynamo.reset()
    if bench.device != "cuda":
        return right(True)
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return Finding(f"{cached} bytes cached after the reset, {left} after emptying", None)
