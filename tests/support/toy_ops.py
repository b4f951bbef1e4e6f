"""Fixture ops in the namespace `toy`: split points, writers and offenders with arithmetic to do by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

LIBRARY = Library("toy", "FRAGMENT")
LOG: list[float] = []  # what `tick` saw, in order


class StepContext:
    """The side channel of the `context_` ops: what a forward context is in a serving engine."""

    slots: Tensor | None = None
    max_len: int = 0
    lens = torch.zeros(1)  # the same on the device, refilled in place
    is_capturing: Callable[[], bool] = staticmethod(lambda: False)


class Host:
    """What `hook` does, and the last constant that `upload` sent: state on the host that no schema shows."""

    function: Callable[[Tensor], Tensor] = staticmethod(lambda q: 2 * q)
    uploaded: float | None = None
    constant = torch.zeros(())
    buffers = (torch.zeros(4096), torch.zeros(4096))
    turn = 0


def _define(schema: str, implementation: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"toy::{name}", fake, lib=LIBRARY)


def _nothing(*args: Any) -> None:
    return None


def _attn(q: Tensor, out: Tensor) -> None:
    out.copy_(2 * q)


def make_three(q: Tensor) -> list[Tensor]:
    return [q + 1, 2 * q, q - 1]


def _tick(q: Tensor) -> None:
    LOG.append(float(q.sum()))


def _kv_write(kv: Tensor, slots: Tensor, cache: Tensor) -> None:
    hits = slots == torch.arange(cache.shape[0]).unsqueeze(1)  # fixed shapes, so that a capture can hold it
    cache.copy_(torch.where(hits.any(1, keepdim=True), kv[hits.int().argmax(1)], cache))


def _context_write(kv: Tensor, cache: Tensor) -> None:
    if StepContext.slots is not None:  # the branch that a capture freezes
        _kv_write(kv, StepContext.slots, cache)


def _context_indexer(q: Tensor, k: Tensor, topk: Tensor) -> None:
    ids = torch.arange(k.shape[0])
    if StepContext.max_len <= topk.shape[1] and not StepContext.is_capturing():  # all are selected
        topk.copy_(torch.where(ids < StepContext.max_len, ids, -1)[: topk.shape[1]])
        return
    beyond = ids >= StepContext.lens
    best = (q @ k.T).masked_fill(beyond, float("-inf")).topk(topk.shape[1]).indices
    best = best.masked_fill(beyond[best], k.shape[0]).sort().values
    topk.copy_(best.masked_fill(best == k.shape[0], -1))


def _topk(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.T).topk(2).indices.to(torch.int32)


def _pingpong(q: Tensor) -> Tensor:
    Host.turn = 1 - Host.turn
    return torch.mul(q, 2, out=Host.buffers[Host.turn][: q.numel()].view(q.shape))


def _offset_view(q: Tensor) -> Tensor:
    return torch.mul(q, 2, out=torch.empty(q.numel() + 8)[8:].view(q.shape))


def _hook(q: Tensor, out: Tensor) -> None:
    out.copy_(Host.function(q))


def _upload(q: Tensor, scale: float, out: Tensor) -> None:
    if Host.uploaded != scale:  # skip if same
        Host.constant.fill_(scale)
        Host.uploaded = scale
    torch.mul(q, Host.constant, out=out)


def _mqa(q: Tensor, cache: Tensor, topk: Tensor, indptr: Tensor, out: Tensor) -> None:
    assert indptr.numel() == q.shape[0] + 1, (indptr.shape, q.shape)
    rows = cache[topk.clamp(min=0).long()].masked_fill((topk < 0)[..., None], 0.0)
    out.copy_(q + rows.sum(1) / (topk >= 0).sum(1, keepdim=True).clamp(min=1))


_define("attn(Tensor q, Tensor(a!) out) -> ()", _attn, _nothing)
_define("fresh(Tensor q) -> Tensor", lambda q: 2 * q, torch.empty_like)
_define(
    "tup(Tensor q) -> (Tensor, Tensor)", lambda q: (q + 1, 2 * q), lambda q: (torch.empty_like(q), torch.empty_like(q))
)
_define("three(Tensor q) -> Tensor[]", lambda q: make_three(q), lambda q: [torch.empty_like(q) for _ in range(3)])
_define("tick(Tensor q) -> ()", _tick, _nothing)
_define("kv_write(Tensor kv, Tensor slots, Tensor(a!) cache) -> ()", _kv_write, _nothing)
_define("context_write(Tensor kv, Tensor(a!) cache) -> ()", _context_write, _nothing)
_define("mqa(Tensor q, Tensor cache, Tensor topk, Tensor indptr, Tensor(a!) out) -> ()", _mqa, _nothing)
_define("context_indexer(Tensor q, Tensor k, Tensor(a!) topk) -> ()", _context_indexer, _nothing)
_define("topk(Tensor q, Tensor k) -> Tensor", _topk, lambda q, k: q.new_empty(q.shape[0], 2, dtype=torch.int32))
_define("hook(Tensor q, Tensor(a!) out) -> ()", _hook, _nothing)
_define("upload(Tensor q, float scale, Tensor(a!) out) -> ()", _upload, _nothing)
_define("over(Tensor q) -> Tensor", lambda q: 2 * q, torch.empty_like)
_define(
    "over.scaled(Tensor q, float scale) -> Tensor", lambda q, scale: scale * q, lambda q, scale: torch.empty_like(q)
)
# Fresh tensors whose address or offset is no allocator's choice.
_define("pingpong(Tensor q) -> Tensor", _pingpong, torch.empty_like)
_define("offset_view(Tensor q) -> Tensor", _offset_view, torch.empty_like)
# Each lies: it returns its buffer for a fresh tensor, in some cases or always; other strides; another dtype.
_define("liar(Tensor x, Tensor(a!) buf) -> Tensor", lambda x, buf: buf.copy_(x), lambda x, buf: buf)
_define(
    "sometimes(Tensor x, Tensor(a!) buf) -> Tensor",
    lambda x, buf: buf.copy_(x) if x.shape[0] % 16 == 0 else buf.copy_(x).clone(),
    lambda x, buf: torch.empty_like(buf),
)
_define("transposed(Tensor q) -> Tensor", lambda q: (2 * q).t().contiguous().t(), torch.empty_like)
_define("widened(Tensor q) -> Tensor", lambda q: 2 * q.double(), torch.empty_like)

SPLIT = ("toy::attn", "toy::fresh", "toy::tup", "toy::three", "toy::tick", "toy::mqa")
