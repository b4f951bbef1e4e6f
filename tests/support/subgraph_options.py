"""Options under which pieces have subgraphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


def run_graph(gm: fx.GraphModule, fakes: Any) -> Callable[..., Any]:
    """A piece compiler: the graph as it is, as one launch."""
    return gm.forward


PARTED = {"aux_streams": 3, "piece_compiler": run_graph}
