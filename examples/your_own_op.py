"""An op of your own as a split point: what the compiler finds out by itself, two ways to tell it, and a contradiction.

The op looks at its data on the host, as attention kernels of serving engines do to choose what they launch. Nothing in
its schema shows that, so the compiler tries to capture it. The capture is refused, and from then on the op is eager:
too late for what `explain` shows, and one capture too many. An op registered as one to be captured is an error.

    python examples/your_own_op.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dsv4_compile
from dsv4_compile.errors import CaptureError
from dsv4_compile.inspect.arguments import OneLineParser

LIBRARY = torch.library.Library("my_engine", "DEF")
LIBRARY.define("attend(Tensor q, Tensor lengths, Tensor(a!) out) -> ()")


def attend(q: Tensor, lengths: Tensor, out: Tensor) -> None:
    """A stand-in for attention: sums q [T, D] over as many rows as the longest request has, into out [T, D]."""
    longest = int(lengths.max())  # the host waits for the device here
    out.copy_(q + q[:longest].sum(0))


LIBRARY.impl("attend", attend, "CompositeExplicitAutograd")
LIBRARY.impl("attend", lambda q, lengths, out: None, "Meta")


class Layer(nn.Module):
    """Projection, the op, projection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x [T, 16] and lengths [B] to [T, 16]."""
        q = self.before(x)
        out = torch.empty_like(q)
        torch.ops.my_engine.attend(q, lengths, out)
        attended: Tensor = self.after(out)
        return attended


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what comes of an op that nobody told of, then the plan and the result after each of the two ways."""
    OneLineParser(description=__doc__).parse_args(arguments)
    layer, x, lengths = Layer(), torch.randn(6, 16), torch.tensor([2, 4])
    dsv4_compile.counters.reset()
    call_often(layer, x, lengths, {})
    print(f"not registered: planned again {dsv4_compile.counters.replans} time")
    check("named in the options", layer, x, lengths, {"split_ops": ("my_engine::attend",)})
    dsv4_compile.register_op("my_engine::attend", role="split")  # counts for every later compilation
    check("registered", layer, x, lengths, {})
    dsv4_compile.register_op("my_engine::attend", role="capture")
    try:
        call_often(layer, x, lengths, {})
    except CaptureError as error:
        print(f"registered as captured: {str(error).partition(chr(10))[0]}")
    dsv4_compile.register_op("my_engine::attend", role="split")


def check(title: str, layer: Layer, x: Tensor, lengths: Tensor, options: dict[str, Any]) -> None:
    """Compare the compiled layer with the eager one, and show the plan's regions."""
    with torch.no_grad():
        equal = torch.equal(call_often(layer, x, lengths, options), layer(x, lengths))
    plan = dsv4_compile.explain(layer, x, lengths, options=options)
    eager = ", ".join(f"{op.op} ({op.reason})" for region in plan.regions for op in region.ops)
    print(
        f"{title}: {len(plan.pieces)} pieces captured; eager: {eager}; the result {'is' if equal else 'is NOT'} equal"
    )


def call_often(layer: Layer, x: Tensor, lengths: Tensor, options: dict[str, Any]) -> Tensor:
    """Warm-up, capture, replay, and again after another plan; the result of the last replay."""
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=options)
    with torch.no_grad():
        results: list[Tensor] = [compiled(x, lengths) for _ in range(5)]
    return results[-1]


if __name__ == "__main__":
    main()
