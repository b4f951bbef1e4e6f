"""Inductor's cache on disk: a second process starts warm, and an op whose schema has changed is not served stale code.

Inductor's key of a graph holds the names of ops and not their schemas. Nothing of ours is written to disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch._dynamo.utils import counters
from torch.library import Library

changed, uncut = sys.argv[1:]
if uncut == "uncut":
    import dsv4_compile.analysis.eager_reasons
    dsv4_compile.analysis.eager_reasons.OWN_NAMESPACES |= {"cached"}

library = Library("cached", "FRAGMENT")
first, second = ("Tensor(a!)", "Tensor") if changed == "first" else ("Tensor", "Tensor(a!)")
library.define(f"stir({first} x, {second} y) -> ()")

def stir(x, y):
    (x if changed == "first" else y).add_(1)

library.impl("stir", stir, "CompositeExplicitAutograd")
torch.library.register_fake("cached::stir", lambda x, y: None, lib=library)

def model(x, y):
    x, y = x * 2, y * 3
    torch.ops.cached.stir(x, y)
    return x.sin(), y.cos()

options = {"engine": "off", "piece_compiler": "inductor"}
compiled = torch.compile(model, backend="dsv4_piecewise", dynamic=True, options=options)
x, y = torch.randn(5, 4), torch.randn(5, 4)
right = all(torch.allclose(*pair) for pair in zip(compiled(x, y), model(x, y)))
print("right" if right else "wrong", "warm" if counters["inductor"]["fxgraph_cache_hit"] else "cold")
"""


def run(cache: Path, changed: str, cut: str = "cut") -> str:
    """What a new process says of its results, and whether it found compiled code on disk."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, changed, cut], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.exhaustive
@pytest.mark.inductor
@pytest.mark.timeout(300)
def test_the_second_process_starts_warm_and_a_changed_schema_gives_the_right_numbers(tmp_path: Path) -> None:
    assert run(tmp_path, "first") == "right cold"
    assert run(tmp_path, "first") == "right warm"
    assert run(tmp_path, "second").startswith("right")


@pytest.mark.exhaustive
@pytest.mark.inductor
@pytest.mark.timeout(300)
def test_without_the_cut_a_changed_schema_is_served_stale_code(tmp_path: Path) -> None:
    """Should this one fail, Inductor's key holds schemas now."""
    assert run(tmp_path, "first", "uncut") == "right cold"
    assert run(tmp_path, "second", "uncut").startswith("wrong")
