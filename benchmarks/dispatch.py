"""What a step costs in dispatch: 61 layers with one split op each, so few numbers that the kernels hardly count.

    python -m benchmarks.dispatch [--layers 61] [--tokens 4] [--seconds 2]

The floor is every kernel of the step as an op overload with its arguments and result bound ahead of time, called one
after another: no Python of the model, no allocation. A captured program may lie below it, since its replays call
torch's public functions, which are cheaper than bound overloads, and leave out copies. Medians of
`torch.utils.benchmark`, all in one process, taken in turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.utils.benchmark import Timer

WIDTH = 4
_library = Library("dispatch_benchmark", "DEF")
_library.define("attend(Tensor q, Tensor(a!) out) -> ()")


def _attend(q: Tensor, out: Tensor) -> None:
    torch.neg(q, out=out)


_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("dispatch_benchmark::attend", lambda q, out: None, lib=_library)


class Toy(nn.Module):
    """Per layer: a projection, a split op that fills a buffer, a projection back, a residual."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.down = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(layers))
        self.up = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] to the same."""
        for down, up in zip(self.down, self.up, strict=True):
            q = torch.mm(x, down)
            out = torch.empty_like(q)
            torch.ops.dispatch_benchmark.attend(q, out)
            x = x + torch.mm(out, up)
        return x


def bound_kernels(model: Toy, x: Tensor) -> list[Callable[[], object]]:
    """The kernels of a step with everything bound: 4 a layer."""
    aten, attend = torch.ops.aten, torch.ops.dispatch_benchmark.attend.default
    kernels: list[Callable[[], object]] = []
    for down, up in zip(model.down, model.up, strict=True):
        q, out, back, total = (torch.empty_like(x) for _ in range(4))
        kernels += [
            partial(aten.mm.out, x, down.detach(), out=q),
            partial(attend, q, out),
            partial(aten.mm.out, out, up.detach(), out=back),
            partial(aten.add.out, x, back, out=total),
        ]
        x = total
    return kernels


def run_all(kernels: Sequence[Callable[[], object]]) -> None:
    """One step of the floor."""
    for kernel in kernels:
        kernel()


def steps(layers: int, tokens: int, device: str) -> dict[str, Callable[[], object]]:
    """What is compared: each does one step of the same model on the same input."""
    model, x = Toy(layers).to(device), torch.randn(tokens, WIDTH, device=device)
    rows: dict[str, Callable[[], object]] = {"floor": partial(run_all, bound_kernels(model, x))}
    rows["eager"] = partial(model, x)
    for name, engine in (("uncaptured", "off"), ("captured", "auto")):
        options: dict[str, Any] = {"split_ops": ["dispatch_benchmark::attend"], "engine": engine}
        compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)
        with torch.no_grad():
            for _ in range(3):  # warm-up, capture, replay
                result = compiled(x)
            assert torch.equal(result, model(x)), name
        rows[name] = partial(compiled, x)
    return rows


def measure(rows: dict[str, Callable[[], object]], seconds: float, rounds: int = 5) -> dict[str, float]:
    """Median seconds of each, measured in turns so that a slow moment of the machine meets all."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    with torch.no_grad():
        for _ in range(rounds):
            for name, step in rows.items():
                timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
                times[name].append(timer.blocked_autorange(min_run_time=seconds / rounds).median)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time of each row")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    medians = measure(steps(options.layers, options.tokens, options.device), options.seconds)
    print(f"{options.layers} layers, {options.tokens} tokens, {options.device}, torch {torch.__version__}")
    print(f"{'':<12}{'us a step':>10}{'of the floor':>14}")
    for name, seconds in medians.items():
        print(f"{name:<12}{seconds * 1e6:>10.0f}{seconds / medians['floor']:>14.2f}")


if __name__ == "__main__":
    main()
