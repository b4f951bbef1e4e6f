"""`dsv4_compile.capture`: warm up and capture the buckets of a compiled model ahead of serving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..counting import counters
from ..log import progress_bar
from .agreement import Agreement
from .engines.capture_state import restoring

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def capture(
    compiled: Callable[..., object],
    inputs_for: Callable[[int], object],
    sizes: Iterable[int],
    *,
    progress: bool | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Call a compiled model twice for each token count, largest first, so that its buckets are captured.

    Caches, buffers and other inputs that compiled graphs write, and the random state, are afterwards as before; what
    eager code after a graph break writes stays, as in any call. Grad is off during the calls. What graphs write is
    copied for the time of each call, so where caches fill the device, capture before they are given their full size.

    Args:
        compiled: what `torch.compile` returned.
        inputs_for: token count -> arguments of one call, as a tuple, or a dict of keyword arguments; dummy data is
            fine.
        sizes: token counts to capture.
        progress: show a progress bar (needs tqdm); None: on a terminal only.
        group: the ranks that take part in the collectives of the model, each of which calls this function too. They
            capture the same sizes in the same order and make equally many calls, or an error says who differs.

    Raises:
        ArgumentError: `compiled` or `inputs_for` cannot be called, or `sizes` is no list of token counts, or not that
            of the other ranks.
        CaptureError: calling `compiled` ran nothing that this backend compiled, or `inputs_for` failed on another rank.
        CollectiveError: a collective of the model failed, as it does after its timeout if another rank has.
    """
    agreement = Agreement(group)
    in_order = agreement.all_made("an argument", partial(_checked_arguments, compiled, inputs_for, sizes))
    agreement.same("the sizes to capture", in_order)
    restoring(_capture, compiled, inputs_for, in_order, progress, agreement)


def _capture(
    compiled: Callable[..., object],
    inputs_for: Callable[[int], object],
    in_order: Sequence[int],
    progress: bool | None,
    agreement: Agreement,
) -> None:
    from ..errors import CaptureError
    from .restore_inputs import RestoringCalls

    def call_twice(size: int) -> None:
        inputs = agreement.all_made(f"inputs_for({size})", partial(inputs_for, size))
        _call_twice(compiled, inputs, agreement)

    calls = RestoringCalls()
    try:
        bar = progress_bar(len(in_order), "bucket", progress)
        with _cache_emptied(), torch.no_grad(), calls as restored, bar as advance:
            graphs = 0
            for size in in_order:
                call_twice(size)
                if not restored.calls:
                    raise CaptureError(
                        f"calling {_name(compiled)} ran nothing that dsv4_piecewise compiled, so there is nothing to "
                        'capture: give what torch.compile(model, backend="dsv4_piecewise") returned'
                    )
                if size == in_order[0]:
                    graphs = counters.graphs_compiled
                advance(1)
            if in_order and agreement.any(counters.graphs_compiled != graphs):
                # a size that happened to be that of another dim was no symbol of its own: a later graph serves it too
                for size in in_order:
                    call_twice(size)
    finally:
        calls.end()  # once more: an interrupt may have come while the block was left


@contextmanager
def _cache_emptied() -> Iterator[None]:
    """Give back what torch has cached on GPUs, before and after.

    A capture cannot have it, and what warm-ups leave in the cache only other warm-ups can use.
    """
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use
    try:
        yield
    finally:
        torch.cuda.empty_cache()


def _call_twice(compiled: Callable[..., object], inputs: object, agreement: Agreement) -> None:
    calls_again = True
    while calls_again:
        plans = counters.replans
        for _ in range(2):  # the first call of a bucket is its warm-up
            _call(compiled, inputs)
        # a second call that shows what no graph can hold, on whichever rank, captures nothing
        calls_again = agreement.any(plans != counters.replans)


def _checked_arguments(compiled: object, inputs_for: object, sizes: object) -> list[int]:
    """The sizes, largest first."""
    _check_callable("compiled", compiled)
    _check_callable("inputs_for", inputs_for)
    return sorted(_checked(sizes), reverse=True)


def _check_callable(argument: str, value: object) -> None:
    from ..errors import ArgumentError

    if not callable(value):
        raise ArgumentError(
            f"capture: {argument} is {value!r}, which cannot be called; the order is compiled, inputs_for, sizes"
        )


def _checked(sizes: object) -> set[int]:
    from ..errors import ArgumentError

    if not isinstance(sizes, Iterable):
        raise ArgumentError(f"capture: sizes is {sizes!r}; it must be a list of token counts")
    given = list(sizes)
    for size in given:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"capture: sizes has {size!r}; a token count is an integer of at least 1")
    return set(given)


def _name(compiled: object) -> str:
    return getattr(compiled, "__name__", type(compiled).__name__)


def _call(compiled: Callable[..., object], inputs: object) -> None:
    if isinstance(inputs, Mapping):
        compiled(**inputs)
    else:
        compiled(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
