"""Sizes of one call: the values of the graph's size symbols, and what expressions of them come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import sympy
import torch
from torch import Tensor, fx

from ..compat.dispatch import with_lazy_bits, with_lazy_bits_of
from ..compat.symbols import Size, expr_of
from ..graph.traced import TensorMeta, Value

KEPT = 64  # token counts of a graph that come again and again, captured or not


class Sizes:
    """Evaluates size expressions for given symbol values, each expression once; any thread may ask at any time."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self._values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self._known: dict[sympy.Expr, int] = {}
        self._meta_tensors: dict[int, tuple[TensorMeta, Tensor]] = {}  # by identity: symbolic sizes have no hash

    def of(self, size: Size) -> int:
        """The value of an int or a SymInt."""
        return self.of_expr(expr_of(size))

    def of_expr(self, expr: sympy.Expr) -> int:
        """The value of an expression."""
        if expr not in self._known:
            self._known[expr] = int(expr.xreplace(self._values))
        return self._known[expr]

    def with_values(self, values: Mapping[sympy.Symbol, int]) -> Sizes:
        """The same sizes but for some symbols."""
        return Sizes({**{symbol: int(value) for symbol, value in self._values.items()}, **values})

    def all_of(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        """The values of several."""
        return tuple(self.of(size) for size in sizes)

    def meta_tensor(self, meta: TensorMeta) -> Tensor:
        """A tensor of this layout on the meta device; made once, so not to be changed."""
        known = self._meta_tensors.get(id(meta))
        if known is None:
            shape, stride = self.all_of(meta.shape), self.all_of(meta.stride)
            plain = torch.empty_strided(shape, stride, dtype=meta.dtype, device="meta")
            known = meta, with_lazy_bits(plain, conj=meta.conj, neg=meta.neg)
            self._meta_tensors[id(meta)] = known
        return known[1]

    def allocate(self, meta: TensorMeta) -> Tensor:
        """Uninitialised memory of this layout."""
        layout = self.meta_tensor(meta)
        made = torch.empty_strided(layout.size(), layout.stride(), dtype=meta.dtype, device=meta.device)
        return with_lazy_bits_of(layout, made)


def bytes_needed(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element of a strided tensor to after the last."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * itemsize


class SizesOfCalls:
    """The `Sizes` of the calls of a graph or of one of its units; those of the last calls are kept.

    Args:
        symbols: the size symbols, and the nodes that have their values.
    """

    def __init__(self, symbols: Mapping[sympy.Symbol, fx.Node]) -> None:
        self._nodes = tuple(symbols.values())
        self._of_numbers = lru_cache(KEPT)(lambda *numbers: Sizes(dict(zip(symbols, numbers, strict=True))))

    def of(self, values: Mapping[fx.Node, Value]) -> Sizes:
        """The sizes of a call, given the values of these nodes."""
        return self._of_numbers(*[int(values[node]) for node in self._nodes])
