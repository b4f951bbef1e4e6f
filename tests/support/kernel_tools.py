"""Kernels run by Triton's interpreter, and batches of sizes that kernels take, whose unused memory is poison."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from paging import Paging, tiny_config
from torch import Tensor

from dsv4_compile.ops.cache_formats import insert_entries, page_bytes, row_bytes
from dsv4_compile.ops.kernels.serve import find_kernels

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1 from the start: make test-kernels"
)
needs_compiler = pytest.mark.skipif(
    not HAS_TRITON or INTERPRETED, reason="needs Triton without TRITON_INTERPRET: make test-kernels"
)
if INTERPRETED:
    import triton_interpreter  # noqa: F401

CONFIG = tiny_config(
    head_dim=64,
    qk_rope_head_dim=16,
    sliding_window=24,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=12,
    swa_block_size=16,
    max_num_batched_tokens=64,
)
LENGTHS = [270, 300, 9, 400, 130]
MIXED = [(1, 253, 6), (0, 0, 5), (3, 126, 3), (2, 8, 1)]
# one token each: the first of all, at the ends of windows, blocks and pages
EDGES = {
    "first": [(0, 0, 1), (1, 1, 1), (3, 3, 1), (2, 4, 1)],
    "window": [(0, 22, 1), (1, 23, 1), (3, 24, 1), (4, 25, 1)],
    "pages": [(0, 15, 1), (1, 16, 1), (3, 255, 1), (4, 127, 1)],
    "long": [(0, 256, 1), (1, 299, 1), (3, 383, 1), (4, 128, 1)],
}
STEPS = {"mixed": MIXED, "one token": [(1, 77, 1)], **EDGES}


class Batch:
    """A step over shuffled blocks, padded at its end.

    Args:
        spans: (request, first position, tokens) of each request of the step.
        padding: padded tokens.
        seed: of the shuffle and of all numbers.
    """

    def __init__(self, spans: list[tuple[int, int, int]], *, padding: int = 2, seed: int = 0) -> None:
        self.paging = Paging(CONFIG, LENGTHS, max_reqs=7, seed=seed)
        self.spans = spans
        self.positions, self.step = self.paging.step(spans, padding=padding)
        self.tokens = self.positions.shape[0]
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def cache(self, group: str, width: int, ratio: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random rows where the step has a row of its requests, NaN everywhere else."""
        rows = self.paging.block_tokens[group] // ratio
        cache = torch.full((self.paging.num_blocks[group], rows, width), float("nan"), dtype=dtype)
        for request, first, count in self.spans:
            for entry in range((first + count) // ratio):
                slot = self.paging.slot(group, request, entry * ratio, ratio)
                cache[slot // rows, slot % rows] = self.randn(width, dtype=dtype)
        return cache

    def packed(self, cache: Tensor, cache_format: str, rope_dims: int = 0) -> Tensor:
        """The same entries in a packed format; pages are longer than their rows, and all other bytes are 255."""
        blocks, rows, width = cache.shape
        bytes_a_row = row_bytes(cache_format, width, rope_dims)
        memory = torch.full((blocks, page_bytes(rows, bytes_a_row, 576)), 255, dtype=torch.uint8)
        packed = memory[:, : rows * bytes_a_row].view(blocks, rows, bytes_a_row)
        owned = (~cache.isnan().any(-1)).flatten().nonzero().squeeze(1)
        insert_entries(packed, owned, cache.flatten(0, 1)[owned], cache_format, rope_dims)
        return packed


def make_call(name: str, arguments: dict[str, Any]) -> Any:
    """The call of an op's kernels."""
    return find_kernels(name)(**arguments)


def run_kernel(name: str, arguments: dict[str, Any]) -> None:
    """Run the kernels of an op on CPU tensors."""
    call = make_call(name, arguments)
    assert call.why_not() is None
    for launch in call.launches():
        launch.run()


def run_both(name: str, arguments: dict[str, Any], *written: str) -> list[tuple[Tensor, Tensor]]:
    """What kernels and the op in torch write, given the same; for each of the `written` arguments."""
    copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    for key, value in arguments.items():
        if isinstance(value, Tensor) and not value.is_contiguous():
            copies[key] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
    run_kernel(name, arguments)
    getattr(torch.ops.dsv4, name)(**copies)
    return [(arguments[key], copies[key]) for key in written]
