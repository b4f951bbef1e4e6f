"""Put a wrapper around a method of vLLM, once: vLLM may call a plugin again, and several models share a class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_wrapped_by_dsv4_compile"


def wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let `owner.name` be what `wrapper` makes of it; a second call changes nothing."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)
