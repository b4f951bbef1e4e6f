"""Ops in the namespace `odd` that are legal and that few people write: containers, views, kernels of every kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

LIBRARY = Library("odd", "FRAGMENT")


def _define(schema: str, implementation: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"odd::{name}", fake, lib=LIBRARY)


def _define_composite(schema: str, implementation: Any) -> None:
    """An op that torch takes apart before a dispatch mode sees it."""
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], implementation, "CompositeImplicitAutograd")


def _scaled_insert(x: Tensor, slots: Tensor, cache: Tensor) -> None:
    cache.copy_(x * slots)


def _list_in_tuple(q: Tensor) -> tuple[Tensor, list[Tensor]]:
    return q + 1, [q * 2, q[:2] * 3]


def _no_list(x: Tensor) -> list[Tensor]:
    x.add_(1)
    return []


def _all_outs(q: Tensor, outs: list[Tensor], also: list[Tensor | None]) -> None:
    for factor, out in enumerate([*outs, *(each for each in also if each is not None)], start=2):
        out.copy_(q * factor)


def _twins(q: Tensor) -> tuple[Tensor, Tensor]:
    whole = q * 2
    return whole, whole[:2]


def _twins_fake(q: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.empty_like(q)
    return whole, whole[:2]


def _context_add(kv: Tensor, cache: Tensor) -> None:
    cache.add_(kv.sum())


_define("no_list(Tensor(a!) x) -> Tensor[]", _no_list, lambda x: [])
_define("all_outs(Tensor q, Tensor(a!)[] outs, Tensor(b!)?[] also) -> ()", _all_outs, lambda q, outs, also: None)
_define(
    "view_and_fresh(Tensor(a) x) -> (Tensor(a), Tensor)",
    lambda x: (x[:2], x * 2),
    lambda x: (x[:2], torch.empty_like(x)),
)
_define("rest_of(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1)[1:], lambda x: x[1:])
_define("head_of(Tensor(a) x, int n) -> Tensor(a)", lambda x, n: x[:n], lambda x, n: x[:n])
_define("list_in_tuple(Tensor q) -> (Tensor, Tensor[])", _list_in_tuple, _list_in_tuple)
_define("copies(Tensor q) -> (Tensor, Tensor)", _twins, _twins_fake)
_define_composite("context_add(Tensor kv, Tensor(a!) cache) -> ()", _context_add)
_define_composite("scaled_insert(Tensor x, Tensor slots, Tensor(a!) cache) -> ()", _scaled_insert)
_define_composite("double(Tensor q) -> Tensor", lambda q: q * 2)
