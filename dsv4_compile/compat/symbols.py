"""Size symbols: SymInts, their expressions, and the bounds and nodes that go with them.

Nothing here may import sympy at module level: `dsv4_compile` is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import fx

if TYPE_CHECKING:
    import sympy

Size: TypeAlias = int | torch.SymInt


def expr_of(size: Size) -> sympy.Expr:
    """The sympy expression of an int or a SymInt.

    The trace writes one symbol for another once it knows them to be equal. It knows so of an unbacked one from an
    assertion, which has yet to hold: until it does, the symbol stands for itself.
    """
    if not isinstance(size, torch.SymInt):
        import sympy

        return sympy.Integer(size)
    expr, own = size.node.expr, size.node._expr
    if expr is own or not any(map(is_unbacked, own.free_symbols)):
        return expr
    backed = {s: size.node.shape_env.replace(s) for s in own.free_symbols if not is_unbacked(s)}
    return own.xreplace(backed)


def size_text(size: Size) -> str:
    """The expression of an int or a SymInt as text; most are ints, of which sympy takes its time to make a text."""
    return str(expr_of(size) if isinstance(size, torch.SymInt) else size)


def traced_value(size: Size) -> int | None:
    """The value an int or a SymInt had when the graph was traced; None for an unbacked one, whose value is unknown."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return None if size.node.hint is None else int(size.node.hint)


def is_ragged(size: Size) -> bool:
    """Whether a size is that of the rows of a jagged nested tensor: their lengths differ, and it is no number."""
    return isinstance(size, torch.SymInt) and (size.node.is_nested_int() or isinstance(size.node.hint, torch.SymInt))


def plausible_value(size: torch.SymInt) -> int:
    """A value that the trace allows for a size of which it knows no more; not 0 or 1, which may stand for something."""
    bounds = size.node.shape_env.bound_sympy(expr_of(size))
    least = max(2, int(bounds.lower)) if bounds.lower.is_Integer else 2
    return min(least, int(bounds.upper)) if bounds.upper.is_Integer else least


def value_of(size: Size, values: Mapping[sympy.Symbol, sympy.Integer]) -> int | None:
    """What an int or a SymInt comes to, given what its symbols are; None if it has others."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    value = expr_of(size).xreplace(values)
    if value.is_number:
        return int(value)
    return None if any(map(is_unbacked, value.free_symbols)) else traced_value(size)


def is_unbacked(symbol: sympy.Symbol) -> bool:
    """A symbol whose value is only known once data is there."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def build_expr(expr: sympy.Expr, symbols: Mapping[sympy.Symbol, fx.Node], graph: fx.Graph) -> fx.Node | int:
    """Nodes that compute a size expression from size symbols, appended at the graph's insertion point.

    Returns an int for a constant, else a node.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    if expr.is_Integer:
        return int(expr)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    environment = {symbol: fx.Proxy(symbols[symbol], tracer) for symbol in expr.free_symbols}
    node: fx.Node = sympy_interp(PythonReferenceAnalysis, environment, expr).node
    return node


def upper_bound(expr: sympy.Expr) -> int | None:
    """The largest value that the current trace's shape environment allows for an expression, if it is finite."""
    mode = torch._guards.TracingContext.get().fake_mode
    shape_env = None if mode is None else mode.shape_env
    if shape_env is None:
        return None
    upper = shape_env.bound_sympy(expr).upper
    # an unbounded size has the largest index, or a symbol for infinity, as its bound
    return int(upper) if upper.is_Integer and upper < torch.iinfo(torch.int32).max else None
