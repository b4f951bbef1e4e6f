"""Workspace of stacks of attention layers, and what more captured sizes cost.

Planned bytes are set against the lower bound (the most that is alive at once) and against what it would be if no two
values shared memory. Allocated bytes are counted at the engine: what it gives out to outlive captures (the arena,
copying in), and what its pools hold for temporaries inside of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsv4_compile.runtime.engines.base import Engine
from dsv4_compile.runtime.engines.select import engine_for

from .attention_stack import pattern, plan_of, stack_and_inputs
from .region import TOKENS
from .sections import Section, Setting, Table

POLICIES = (("mrv1", "wide"), ("mrv1", "minimal"), ("mrv2", "narrow"))
BUCKETS = (64, 48, 32, 24, 16, 8, 4, 2)
PLANNED = """
Workspace of a stack of tiny attention layers for {tokens} tokens, in bytes. Layers share it, so it does not grow with
their number; unshared is what it would be if no two values shared memory.
"""
BY_BUCKET = """
Bytes allocated after each captured size, largest first, for {layers} layers under mrv1. The arena is made once for the
largest. The pool holds temporaries inside of pieces: sizes share it by default, and with `pool="bucket"` each has its
own.
"""


class Allocations:
    """What an engine gives out.

    Attributes:
        lasting: bytes that outlive captures.
        pools: the pools made.
    """

    def __init__(self) -> None:
        self.lasting = 0
        self.pools: list[Any] = []

    def pooled(self, device: torch.device) -> int:
        """Bytes held by pools; on a CUDA device, all that torch has reserved and has not given out to tensors."""
        if device.type == "cuda":
            return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return sum(pool.nbytes for pool in self.pools)


@contextmanager
def counted_allocations(engine: Engine) -> Iterator[Allocations]:
    """What an engine gives out inside of the block."""
    counted = Allocations()
    allocate: Callable[[int, torch.device], Tensor] = engine.allocate
    make_pool: Callable[[], Any] = engine.make_pool

    def counting_allocate(nbytes: int, device: torch.device) -> Tensor:
        counted.lasting += nbytes
        return allocate(nbytes, device)

    def counting_make_pool() -> Any:
        counted.pools.append(make_pool())
        return counted.pools[-1]

    engine.allocate = counting_allocate  # type: ignore[method-assign]
    engine.make_pool = counting_make_pool  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        del engine.allocate, engine.make_pool


def allocated_by_bucket(layers: int, device: str, pool: str) -> list[tuple[int, int]]:
    """After each of `BUCKETS`: bytes that outlive captures, bytes in pools."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"runner": "mrv1", "capture_sizes": list(BUCKETS), "pool": pool}
    stack, _ = stack_and_inputs(layers, 2, device)
    compiled = torch.compile(stack, backend="dsv4_piecewise", dynamic=True, options=options)
    found = []
    place = torch.device(device)
    with counted_allocations(engine_for("auto", place)) as counted:
        for bucket in BUCKETS:
            _, inputs = stack_and_inputs(layers, bucket, device)
            with torch.no_grad():
                for _ in range(2):  # warm-up, capture
                    compiled(*inputs)
            found.append((counted.lasting, counted.pooled(place)))
    return found


def planned_table(depths: tuple[int, ...]) -> Table:
    """Planned bytes beside both bounds."""
    rows = []
    for layers in depths:
        for policy in POLICIES:
            space = plan_of(pattern(layers), TOKENS, *policy).workspace
            figures = (space.planned, space.lower_bound, space.unshared)
            ratio = f"{space.planned / space.lower_bound:.3f}"
            rows.append((str(layers), " ".join(policy), *(str(figure) for figure in figures), ratio))
    columns = ("layers", "", "planned", "lower bound", "unshared", "planned, of the bound")
    return Table(columns, tuple(rows))


def run(setting: Setting) -> Section:
    """Plans of both depths; captures of the smaller one."""
    depths = (3, 5) if setting.quick else (3, 61)
    shared, apart = (allocated_by_bucket(depths[0], setting.device, pool) for pool in ("shared", "bucket"))
    rows = (
        (str(number), str(bucket), str(lasting), str(pooled), str(own_pools))
        for number, (bucket, (lasting, pooled), (_, own_pools)) in enumerate(
            zip(BUCKETS, shared, apart, strict=True), start=1
        )
    )
    grown = Table(
        ("sizes captured", "the last one", "arena and copying in", "shared pool", "pools of each"), tuple(rows)
    )
    parts = (PLANNED.format(tokens=TOKENS), planned_table(depths), BY_BUCKET.format(layers=depths[0]), grown)
    return Section(title="Memory", parts=parts)
