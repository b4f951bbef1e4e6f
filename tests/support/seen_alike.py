"""Compiled beside eager, over the calls of a bucket, in all that a caller can see: layouts, identity, lazy bits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from repository import ROOT
from toy_ops import SPLIT

sys.path.insert(0, str(ROOT))

from benchmarks.alike import differences

HOST: Mapping[str, Any] = {"engine": "host"}
OFF: Mapping[str, Any] = {"engine": "off"}
MINIMAL: Mapping[str, Any] = {"engine": "host", "runner": "mrv1", "region": "minimal"}
COMPILED: Mapping[str, Any] = {"engine": "host", "piece_compiler": "aot_eager"}


def assert_alike(
    function: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], *, calls: int = 4, **options: Any
) -> None:
    """Raise unless every call is as in eager: its results, its arguments, and what shares memory with what.

    Args:
        function: to be compiled.
        make: number of the call -> arguments, the same tensors for the same number; all calls are of one bucket.
        calls: how many: a warm-up, a capture, and replays.
        options: of the backend.
    """
    settings = {"runner": "mrv2", "split_ops": SPLIT, **options}
    compiled = torch.compile(function, backend="dsv4_piecewise", dynamic=True, options=settings)
    for call in range(calls):
        torch.manual_seed(call)
        eager_args = make(call)
        torch.manual_seed(call)
        args = make(call)
        with torch.no_grad():
            expected, actual = function(*eager_args), compiled(*args)
        found = differences((expected, eager_args), (actual, args))
        assert not found, f"call {call}: {found}"
