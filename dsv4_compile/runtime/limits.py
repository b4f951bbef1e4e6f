"""Which buckets are captured, and how large the arena may get: `capture_sizes`, `max_captures`, `max_tokens`."""

from __future__ import annotations

import logging

import sympy

from ..config import Config
from .sizes import Sizes

log = logging.getLogger("dsv4_compile")


class Limits:
    """The limits of one compiled graph.

    Args:
        config: the options.
        tokens: the token count as an expression of the size symbols; None if the graph has none.
        bound: the largest token count, where options or the shape environment know it.
    """

    def __init__(self, config: Config, tokens: sympy.Expr | None, bound: int | None) -> None:
        self._config = config
        self._tokens = tokens
        self._bound = bound
        self._has_warned = False

    def excludes(self, sizes: Sizes) -> bool:
        """Whether calls of these sizes always run uncaptured: no tokens, not in the list, or above the bound."""
        if self._tokens is None:
            return False
        tokens = sizes.of_expr(self._tokens)
        listed = self._config.capture_sizes
        above = self._bound is not None and tokens > self._bound
        return tokens == 0 or above or (listed is not None and tokens not in listed)

    def largest(self, sizes: Sizes) -> Sizes | None:
        """The sizes of the largest bucket, other sizes as in this call; None if there is no bound on tokens."""
        if self._bound is None or self._tokens is None or not self._tokens.is_Symbol:
            return None
        return sizes.with_value(self._tokens, max(self._bound, sizes.of_expr(self._tokens)))

    def warn_full(self, most: int) -> None:
        """Say once that new buckets run uncaptured."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("max_captures=%d buckets are captured; new ones run uncaptured from now on", most)
