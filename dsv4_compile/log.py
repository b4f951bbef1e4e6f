"""What this package tells people: its logger, counts in sentences, and a bar for those who watch.

The bar is shown on a terminal, and only if tqdm happens to be installed.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("dsv4_compile")


def pluralize(number: int, noun: str) -> str:
    """ "1 op", "2 ops"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@contextmanager
def progress_bar(total: int, unit: str, show: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Count up to `total`; what is yielded is called with each advance.

    Args:
        total: when it is full.
        unit: what is counted, for example "tok".
        show: True or False decides; None shows a bar if standard error is a terminal. Without tqdm there is none.
    """
    try:
        tqdm = importlib.import_module("tqdm").tqdm if _wanted(show) else None
    except ModuleNotFoundError:
        tqdm = None
    if tqdm is None:
        yield lambda advance: None
        return
    with tqdm(total=total, unit=unit, leave=False) as bar:
        yield bar.update


def _wanted(show: bool | None) -> bool:
    return sys.stderr.isatty() if show is None else show
