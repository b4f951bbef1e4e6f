"""Fixture ops in the namespace `toy`: split points, writers and offenders with arithmetic to do by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

LIBRARY = Library("toy", "FRAGMENT")
LOG: list[float] = []  # what `tick` saw, in order


class StepContext:
    """The side channel of `context_write`: what a forward context is in a serving engine."""

    slots: Tensor | None = None


def _define(schema: str, implementation: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"toy::{name}", fake, lib=LIBRARY)


def _nothing(*args: Any) -> None:
    return None


def _attn(q: Tensor, out: Tensor) -> None:
    out.copy_(2 * q)


def _tick(q: Tensor) -> None:
    LOG.append(float(q.sum()))


def _kv_write(kv: Tensor, slots: Tensor, cache: Tensor) -> None:
    kept = slots >= 0
    cache[slots[kept]] = kv[kept]


def _context_write(kv: Tensor, cache: Tensor) -> None:
    if StepContext.slots is not None:  # the branch that a capture freezes
        _kv_write(kv, StepContext.slots, cache)


def _mqa(q: Tensor, cache: Tensor, topk: Tensor, indptr: Tensor, out: Tensor) -> None:
    assert indptr.numel() == q.shape[0] + 1, (indptr.shape, q.shape)
    rows = cache[topk.clamp(min=0).long()].masked_fill((topk < 0)[..., None], 0.0)
    out.copy_(q + rows.sum(1) / (topk >= 0).sum(1, keepdim=True).clamp(min=1))


_define("attn(Tensor q, Tensor(a!) out) -> ()", _attn, _nothing)
_define("fresh(Tensor q) -> Tensor", lambda q: 2 * q, torch.empty_like)
_define(
    "tup(Tensor q) -> (Tensor, Tensor)", lambda q: (q + 1, 2 * q), lambda q: (torch.empty_like(q), torch.empty_like(q))
)
_define(
    "three(Tensor q) -> Tensor[]", lambda q: [q + 1, 2 * q, q - 1], lambda q: [torch.empty_like(q) for _ in range(3)]
)
_define("tick(Tensor q) -> ()", _tick, _nothing)
_define("kv_write(Tensor kv, Tensor slots, Tensor(a!) cache) -> ()", _kv_write, _nothing)
_define("context_write(Tensor kv, Tensor(a!) cache) -> ()", _context_write, _nothing)
_define("mqa(Tensor q, Tensor cache, Tensor topk, Tensor indptr, Tensor(a!) out) -> ()", _mqa, _nothing)
# Promises a fresh tensor and returns its buffer.
_define("liar(Tensor x, Tensor(a!) buf) -> Tensor", lambda x, buf: buf.copy_(x), lambda x, buf: buf)

SPLIT = ("toy::attn", "toy::fresh", "toy::tup", "toy::three", "toy::tick", "toy::mqa")
