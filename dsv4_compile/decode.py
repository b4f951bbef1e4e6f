"""What a serving loop says of the batch of its next call: that it is uniform decode.

    with dsv4_compile.uniform_decode(query_len=1):
        logits = compiled(input_ids, positions, step)

Uniform decode is a batch in which every request has the same, small number of tokens. Split ops that are registered as
capturable then launch the same kernels whatever the lengths are, so the whole step may be one captured graph. Which
graph serves a call cannot be an argument of it, or Dynamo would trace the model once more for it. So it is said around
the call, once for the thread, and read when compiled code runs.

Note "a block that is cut short": a signal handler may raise in the first bytecode of `__exit__`. If what is said
stayed, a later batch of prefill would be served as decode. So each entry of a block counts only while something lives
that the `with` statement alone holds: the very callable that it got for `__exit__`. However the block is left, that one
goes. Whoever calls `__enter__` and `__exit__` by hand, as `contextlib.ExitStack` does, is not protected so.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from .compat.dynamo import is_tracing, run_while_tracing

_Entry: TypeAlias = "tuple[UniformDecode, Callable[[], object]]"  # a block, and what says whether it goes on


class _ThisThread(threading.local):
    """Blocks that this thread is in, the innermost last, and the callable with which it is about to enter one."""

    entries: tuple[_Entry, ...] = ()
    entering: Callable[[], object] | None = None


_this_thread = _ThisThread()


def uniform_decode(query_len: int = 1) -> UniformDecode:
    """A block in which calls of compiled models, by this thread, are of batches of uniform decode.

    It is a promise: every request of the batch has `query_len` rows in it, the last of which may be padding; more rows
    of padding may follow. Blocks may be nested, and the innermost counts. A model that has no full graph runs as it
    would outside.

    Args:
        query_len: rows of each request: 1, or more where tokens are drafted ahead. Each value has its own captures.

    Raises:
        ArgumentError: `query_len` is no integer of at least 1, or this is inside of a compiled function.
    """
    _refuse_to_be_traced("uniform_decode")
    if isinstance(query_len, bool) or not isinstance(query_len, int) or query_len < 1:
        from .errors import ArgumentError

        raise ArgumentError(f"uniform_decode: query_len is {query_len!r}; it must be an integer of at least 1")
    return UniformDecode(query_len)


def uniform_query_len() -> int | None:
    """The `query_len` of the block of `uniform_decode` that this thread is in; None outside of any.

    For ops, which may then do without what they read on the host in other batches.

    Raises:
        ArgumentError: it is called by compiled code, which would keep the answer for ever.
    """
    _refuse_to_be_traced("uniform_query_len")
    return current_query_len()


def current_query_len() -> int | None:
    """The same for who is never traced."""
    entries = _this_thread.entries
    if not entries:
        return None
    for block, is_held in reversed(entries):
        if is_held() is not None:
            return block.query_len
    return None


class _Leaving:
    """Gives each `with` statement a callable of its own to leave the block with; see "a block that is cut short"."""

    def __get__(self, block: UniformDecode | None, owner: type[UniformDecode]) -> Callable[..., None]:
        if block is None:
            return _leave  # for who holds the block and no `with` statement
        leave = partial(_leave, block)
        _this_thread.entering = weakref.ref(leave)
        return leave


class UniformDecode:
    """A block of `uniform_decode`; it may be entered more than once, and by several threads.

    Attributes:
        query_len: tokens of each request.
    """

    def __init__(self, query_len: int) -> None:
        self.query_len = query_len

    def __enter__(self) -> None:
        _refuse_to_be_traced("uniform_decode")
        is_held, _this_thread.entering = _this_thread.entering, None
        if is_held is None or is_held() is None:  # no `with` statement is entering
            is_held = _always
        going_on = [entry for entry in _this_thread.entries if entry[1]() is not None]
        _this_thread.entries = (*going_on, (self, is_held))

    __exit__ = _Leaving()


def _leave(block: UniformDecode, *_: object) -> None:
    """End the innermost entry of a block, and what is left of those inside of it."""
    entries = _this_thread.entries
    for index in reversed(range(len(entries))):
        if entries[index][0] is block and entries[index][1]() is not None:
            _this_thread.entries = entries[:index]
            return


def _always() -> object:
    return True


@run_while_tracing
def _refuse_to_be_traced(name: str) -> None:
    if is_tracing():
        from .errors import ArgumentError

        raise ArgumentError(
            f"{name} is called inside of a compiled function: what it says is of a batch, and would be kept with the "
            "graph. Say it around the call of the compiled model, and ask inside of an op."
        )
