"""One attention layer alone: compile it, call it three times, look at the plan.

python examples/compile_attention.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _layer import layer_and_inputs

import dsv4_compile
from dsv4_compile.inspect.arguments import OneLineParser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what became of the layer, and how the three calls ran."""
    OneLineParser(description=__doc__).parse_args(arguments)
    layer, args = layer_and_inputs(num_tokens=8)
    options: dict[str, Any] = {"runner": "mrv2"}
    print(dsv4_compile.explain(layer, *args, options=options))

    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=options)
    with torch.no_grad():
        expected = layer(*args)
        for call in ("warm-up", "capture", "replay"):
            equal = torch.equal(compiled(*args), expected)
            print(f"{call}: {'equal to' if equal else 'DIFFERS from'} the eager layer")
    print(dsv4_compile.counters)


if __name__ == "__main__":
    main()
