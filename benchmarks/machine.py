"""What a figure depends on beside the code: machine, versions, date and what else ran. No names of hosts, no paths."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from .sections import Table


def describe(started: Sequence[float]) -> Table:
    """Facts about this run, for the head of the results.

    Args:
        started: `os.getloadavg()` when the run began.
    """
    loads = (started[0], os.getloadavg()[0])
    return Table(
        ("", "this run"),
        (
            ("date", f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"),
            ("processor", f"{processor()}, {os.cpu_count()} cores, {memory_gib():.0f} GiB of memory"),
            ("GPU", torch.cuda.get_device_name() if torch.cuda.is_available() else "none"),
            ("system", f"{platform.system()}, Python {platform.python_version()}"),
            ("torch", f"{torch.__version__}, {torch.get_num_threads()} thread"),
            ("dsv4_compile", version("dsv4-compile")),
            ("load average", f"{loads[0]:.1f} at the start, {loads[1]:.1f} at the end (1 is this run alone)"),
        ),
    )


def processor() -> str:
    """The model name of the processor, as Linux tells it; elsewhere what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_gib() -> float:
    """Memory of the machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
