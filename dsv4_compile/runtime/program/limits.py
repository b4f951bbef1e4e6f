"""Which buckets are captured, how large the arena may get, and which buckets use side streams.

That is what the options `capture_sizes`, `max_captures`, `max_tokens` and `aux_stream_max_tokens` say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import sympy

from ...analysis.sizes import Sizes
from ...compat.symbols import expr_of
from ...config import Config
from ...graph.partitioned import Slot

log = logging.getLogger("dsv4_compile")


class Limits:
    """The limits of one compiled graph.

    Args:
        config: the options.
        tokens: the token count as an expression of the size symbols; None if the graph has none.
        bound: the largest token count, where options or the shape environment know it.
        slots: what the arena has to hold.
    """

    def __init__(self, config: Config, tokens: sympy.Expr | None, bound: int | None, slots: Sequence[Slot]) -> None:
        self._config = config
        self._tokens = tokens
        self._bound = bound
        self._largest = None if tokens is None or bound is None else _largest_symbols(tokens, bound, slots)
        self._warned: set[str] = set()

    def excludes(self, sizes: Sizes) -> bool:
        """Whether calls of these sizes always run uncaptured: no tokens, not in the list, or above the bound."""
        if self._tokens is None:
            return False
        tokens = sizes.of_expr(self._tokens)
        listed = self._config.capture_sizes
        above = self._bound is not None and tokens > self._bound
        return tokens == 0 or above or (listed is not None and tokens not in listed)

    def listed(self, sizes: Sizes) -> int | None:
        """The token count of these sizes, if the options list those that are to be captured."""
        is_listed = self._config.capture_sizes is not None and self._tokens is not None
        return sizes.of_expr(self._tokens) if is_listed else None

    def streams(self, most: int, sizes: Sizes) -> int:
        """How many of the side streams of the plan calls of these sizes use: all, or none where it does not pay."""
        small = self._tokens is None or sizes.of_expr(self._tokens) <= self._config.aux_stream_max_tokens
        return most if small else 0

    def largest(self, sizes: Sizes) -> Sizes | None:
        """The sizes of the largest bucket; None if slots depend on sizes that have no bound.

        An arena for the largest token count alone would be too small once another size grows.
        """
        return None if self._largest is None else sizes.with_values(self._largest)

    def warn_full(self, most: int) -> None:
        """Say once that new buckets run uncaptured."""
        self._warn_once("max_captures=%d buckets are captured; new ones run uncaptured from now on", most)

    def warn_moving(self) -> None:
        """Say once that static inputs are captured again and again."""
        self._warn_once(
            "static inputs keep changing their addresses, and each move is a new capture; keep them where they are"
        )

    def warn_unordered(self) -> None:
        """Say once that a call runs uncaptured since another thread's call goes on."""
        self._warn_once(
            "calls run uncaptured while a call of another thread gives work to this device, on another stream or to "
            "warm up or capture: give all calls one stream, and capture ahead"
        )

    def warn_pieces(self, reason: str | None) -> None:
        """Say once why a call of uniform decode is no single graph."""
        self._warn_once("calls of uniform decode run in pieces: %s", reason)

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)


def _largest_symbols(tokens: sympy.Expr, bound: int, slots: Sequence[Slot]) -> dict[sympy.Symbol, int] | None:
    """The largest value of the one size symbol that keeps the token count within its bound, if slots need no other."""
    free: set[sympy.Symbol] = set()
    for slot in slots:
        free |= {symbol for size in (*slot.meta.shape, *slot.meta.stride) for symbol in expr_of(size).free_symbols}
    if not free:
        return {}
    if free != tokens.free_symbols or len(free) != 1:
        return None
    (symbol,) = free
    return {symbol: _largest_value(lambda value: Sizes({symbol: value}).of_expr(tokens) <= bound)}


def _largest_value(fits: Callable[[int], bool]) -> int:
    """The largest value that fits, by bisection: a token count grows with the size that it comes from."""
    low, high = 0, 1
    while fits(high) and high < 1 << 40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
