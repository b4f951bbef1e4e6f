"""Compile time by depth: does it stay flat while layers repeat, and how far is it below plain `torch.compile`?

Each figure is one compilation in a process of its own (`compile_once`). "cold" starts from a cache folder in which
nothing but Inductor's header is, "warm" is a second process with the cache that the first one left.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .compile_once import APART, METHODS, OURS, PLAIN
from .sections import Section, Setting, Table

ROOT = Path(__file__).parent.parent
INTRO = """
Seconds of processor time (the C++ compiler's included) from the first call to a compiled model on the CPU, Inductor
inside of each, each in a process of its own: cold with an empty cache on disk, warm in a second process with the cache
that the first one left. The attention stack has C128A and C4A layers in turn; the toy is that of benchmarks/toy.py.
Tracing is Dynamo's own share, the same for all; beyond it is what the backend takes. Without reuse every piece goes to
Inductor, which then finds equal ones in its own cache. Left out: imports, what Inductor does once (looking at the C++
compiler, a precompiled header), and the second call, in which a bucket is captured. Each figure is one compilation.
"""
AIMS = """
Ratios of {deep} layers beside the aims. "In all" has Dynamo's tracing in it, which no backend can shorten. With a warm
cache torch.compile looks up its one graph and does little else, while our passes run as ever, in proportion to depth:
there both aims are out of reach.
"""
SHARES = """
Where our backend's time goes: the passes look at every node, so they grow with depth; pieces that differ are compiled
once each; the rest makes what runs. In the second call the host engine records every op; with a warm cache that is the
largest part of getting ready.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One figure: which model, how deep, from which cache, by which method."""

    model: str
    layers: int
    cache: str
    method: str


Results = Mapping[Case, Mapping[str, float]]


def measure_all(models: tuple[str, ...], depths: tuple[int, ...]) -> dict[Case, dict[str, float]]:
    """Every method on every model, cold and then warm."""
    results: dict[Case, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache, started = Path(folder, "cache"), Path(folder, "started")
        in_new_process(cache)
        shutil.copytree(cache, started)
        for model in models:
            for layers in depths:
                for method in METHODS:
                    shutil.rmtree(cache)
                    shutil.copytree(started, cache)
                    for state in ("cold", "warm"):
                        case = Case(model=model, layers=layers, cache=state, method=method)
                        results[case] = json.loads(in_new_process(cache, model, str(layers), method))
    return results


def in_new_process(cache: Path, *arguments: str) -> str:
    """What `compile_once` prints with Inductor's cache in a folder of its own."""
    command = [sys.executable, "-m", "benchmarks.compile_once", *arguments]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def run(setting: Setting) -> Section:
    """Measure, and set the figures against the aims."""
    models, depths = (("toy",), (1, 2)) if setting.quick else (("stack", "toy"), (4, 61))
    return section_of(measure_all(models, depths))


def section_of(results: Results) -> Section:
    """The figures as tables."""
    times = Table(
        ("model", "layers", "cache", "", "tracing", "beyond", "beyond, of torch.compile", "in all, of torch.compile"),
        tuple(_time_row(case, results) for case in results),
    )
    shares = Table(
        ("model", "layers", "cache", "passes", "pieces", "rest", "second call"),
        tuple(_share_row(case, seconds) for case, seconds in results.items() if case.method == OURS),
    )
    deep, shallow = max(case.layers for case in results), min(case.layers for case in results)
    aims = Table(
        (
            "model",
            "cache",
            f"beyond tracing, {deep} layers of {shallow} (aim: 1.5)",
            "in all, of torch.compile (aim: 0.4)",
            "beyond tracing, of torch.compile",
            "beyond tracing, no reuse of reuse",
        ),
        tuple(_aim_row(case, results, shallow) for case in results if case.layers == deep and case.method == OURS),
    )
    return Section(title="Compile time", parts=(INTRO, times, AIMS.format(deep=deep), aims, SHARES, shares))


def _time_row(case: Case, results: Results) -> tuple[str, ...]:
    seconds, plain = results[case], results[_other(case, method=PLAIN)]
    return (
        case.model,
        str(case.layers),
        case.cache,
        case.method,
        f"{seconds['tracing']:.2f}",
        f"{seconds['backend']:.2f}",
        f"{seconds['backend'] / plain['backend']:.2f}",
        f"{_total(seconds) / _total(plain):.2f}",
    )


def _share_row(case: Case, seconds: Mapping[str, float]) -> tuple[str, ...]:
    rest = seconds["backend"] - seconds["plan"] - seconds["pieces"]
    shown = (seconds["plan"], seconds["pieces"], rest, seconds["second"])
    return (case.model, str(case.layers), case.cache, *(f"{figure:.2f}" for figure in shown))


def _aim_row(case: Case, results: Results, shallow: int) -> tuple[str, ...]:
    deep, flat = results[case], results[_other(case, layers=shallow)]
    plain, apart = results[_other(case, method=PLAIN)], results[_other(case, method=APART)]
    ratios = (
        deep["backend"] / flat["backend"],
        _total(deep) / _total(plain),
        deep["backend"] / plain["backend"],
        apart["backend"] / deep["backend"],
    )
    return case.model, case.cache, *(f"{ratio:.2f}" for ratio in ratios)


def _other(case: Case, *, method: str | None = None, layers: int | None = None) -> Case:
    return Case(model=case.model, layers=layers or case.layers, cache=case.cache, method=method or case.method)


def _total(seconds: Mapping[str, float]) -> float:
    return seconds["tracing"] + seconds["backend"]
