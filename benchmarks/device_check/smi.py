"""What `nvidia-smi` tells of a GPU; nothing is set."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
QUERIES = ("driver_version", "vbios_version", "persistence_mode", "compute_mode", "mig.mode.current", *CLOCKS)


def ask_smi(queries: Sequence[str]) -> dict[str, str]:
    """The answer to each query; one that is not known here is left out, and all are without the tool."""
    if shutil.which("nvidia-smi") is None:
        return {}
    together = _ask(queries)
    if together is not None and len(together) == len(queries):
        return dict(zip(queries, together, strict=True))
    answers = {query: _ask([query]) for query in queries}
    return {query: answer[0] for query, answer in answers.items() if answer}


def _ask(queries: Sequence[str]) -> list[str] | None:
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return [cell.strip() for cell in lines[0].split(",")] if done.returncode == 0 and lines else None
