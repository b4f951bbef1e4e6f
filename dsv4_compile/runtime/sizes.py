"""Sizes of one call: the values of the graph's size symbols, and what expressions of them come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ..compat import expr_of
from ..draft import Draft, TensorMeta


class Sizes:
    """Evaluates size expressions for given symbol values, each expression once."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self._values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self._known: dict[sympy.Expr, int] = {}

    def of(self, size: Any) -> int:
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

    def all_of(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        """The values of several."""
        return tuple(self.of(size) for size in sizes)

    def allocate(self, meta: TensorMeta) -> Tensor:
        """Uninitialised memory of this layout."""
        return torch.empty_strided(
            self.all_of(meta.shape), self.all_of(meta.stride), dtype=meta.dtype, device=meta.device
        )


def sizes_of_call(draft: Draft, values: Mapping[fx.Node, Any]) -> Sizes:
    """The sizes of a call, given the values of the graph's placeholders."""
    return Sizes({symbol: int(values[node]) for symbol, node in draft.symbols.items()})
