"""S0: what the machine is, which tools it has, and whether the backend can be used on it at all."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

import dsv4_compile
from dsv4_compile.inspect import doctor

from ...machine import memory_gib, processor
from ..bench import Bench
from ..parent import ROOT
from ..smi import QUERIES, ask_smi

PACKAGES = ("triton", "pytest", "pytest-xdist", "pytest-timeout", "transformers", "cuda-bindings", "nvidia-cudnn-cu13")
TOOLS = ("gcc", "g++", "nvcc", "nvidia-smi", "compute-sanitizer", "nsys", "ncu")


def run(bench: Bench) -> None:
    """Facts first, then the doctor, who compiles."""
    facts: dict[str, str | int | float | None] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory_gib()),
        "installed": _version("dsv4-compile"),
        "package": dsv4_compile.__version__,
        **{name: _version(name) for name in PACKAGES},
        **{name: shutil.which(name) or "not found" for name in TOOLS},
        "cuda.bindings.driver": _has("cuda.bindings.driver"),
    }
    for name, value in facts.items():
        bench.row("fact", value, name=name)
    place = Path(dsv4_compile.__file__).resolve().parent
    bench.row("from_checkout", place == ROOT / "dsv4_compile", expected=True, what="the package that runs")
    if bench.device == "cuda":
        with bench.attempt(what="the device"):
            _device_facts(bench)
    with bench.attempt(what="doctor"):
        found = doctor.diagnose()
        bench.row("doctor", str(found), what="doctor")
        bench.row("usable", found.problem or "yes", expected="yes", what="doctor")


def _device_facts(bench: Bench) -> None:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    facts: dict[str, str | int] = {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_bytes": total,
        "gpu_free_bytes": free,
        "runtime": str(getattr(torch._C, "_cuda_getCompiledVersion", lambda: "unknown")()),
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "")),
        **ask_smi(QUERIES),
    }
    facts["driver"] = facts.pop("driver_version", "unknown")
    for name, value in facts.items():
        bench.row("fact", value, name=name)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _has(module: str) -> str:
    try:
        return "found" if find_spec(module) is not None else "not found"
    except (ImportError, ValueError):
        return "not found"
