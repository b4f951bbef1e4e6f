"""Workspace of stacks of attention layers, and what more buckets cost.

    python -m benchmarks.memory [--device cpu]

First table: bytes planned, the lower bound (the most that is alive at once) and the sum if nothing were shared, for the
sizes of the trace. Second: bytes that the engine has allocated after each captured bucket, largest bucket first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import dsv4_compile
from dsv4_compile.runtime.engine import Engine, engine_for

from .attention_stack import stack_and_inputs
from .ttft import CONFIGURATIONS

BUCKETS = (64, 48, 32, 24, 16, 8, 4, 2)


def planned(layers: int, tokens: int) -> Iterator[tuple[str, int, int, int]]:
    """Configuration, planned, lower bound, unshared."""
    for name, options in CONFIGURATIONS.items():
        stack, inputs = stack_and_inputs(layers, tokens)
        workspace = dsv4_compile.explain(stack, *inputs, options=options).workspace
        yield name, workspace.planned, workspace.lower_bound, workspace.unshared


@contextmanager
def counted_allocations(engine: Engine) -> Iterator[list[int]]:
    """The sizes of what an engine allocates inside of the block."""
    sizes: list[int] = []
    allocate = engine.allocate

    def counting(nbytes: int, device: torch.device) -> Tensor:
        sizes.append(nbytes)
        return allocate(nbytes, device)

    engine.allocate = counting  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        del engine.allocate


def allocated_by_bucket(layers: int, device: str) -> list[tuple[int, int]]:
    """Bucket and bytes allocated so far."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"runner": "mrv1", "capture_sizes": list(BUCKETS)}
    stack, _ = stack_and_inputs(layers, 2, device)
    compiled = torch.compile(stack, backend="dsv4_piecewise", dynamic=True, options=options)
    rows = []
    with counted_allocations(engine_for("auto", torch.device(device))) as sizes:
        for bucket in BUCKETS:
            _, inputs = stack_and_inputs(layers, bucket, device)
            with torch.no_grad():
                for _ in range(2):
                    compiled(*inputs)
            rows.append((bucket, sum(sizes)))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 61])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    print(f"{'layers':<8}{'':<14}{'planned':>12}{'lower bound':>13}{'unshared':>12}{'of the bound':>14}")
    for layers in options.layers:
        for name, used, bound, unshared in planned(layers, options.tokens):
            print(f"{layers:<8}{name:<14}{used:>12}{bound:>13}{unshared:>12}{used / bound:>14.3f}")
    print(f"\n{'bucket':<8}{'bytes allocated so far':>24}")
    for bucket, total in allocated_by_bucket(options.layers[0], options.device):
        print(f"{bucket:<8}{total:>24}")


if __name__ == "__main__":
    main()
