"""The callable of `engine="off"`: pieces and regions one after another, nothing captured."""

from __future__ import annotations

from typing import Any

from ..counting import counters
from ..draft import Draft


class UncapturedCallable:
    """Runs the units of one partitioned graph; holds no state of a call, so any thread may call it at any time."""

    def __init__(self, draft: Draft) -> None:
        assert draft.stitched is not None, "the graph is partitioned by now"
        self._stitched = draft.stitched
        self._eager_ops = sum(len(unit.nodes) for unit in draft.units if unit.kind == "region")
        for copy, original in draft.copies.items():
            # weights are inputs of a piece, so one module serves all that are the same
            self._stitched.add_module(copy, self._stitched.get_submodule(original))

    def __call__(self, *args: Any) -> Any:
        """Take and return what Dynamo's graph does."""
        counters.add(uncaptured_calls=1, eager_op_calls=self._eager_ops)
        return self._stitched(*args)
