"""`python -m dsv4_compile doctor`: can the backend be used on this machine, and what would it choose?

The proof is a trial: a small function is compiled, captured and replayed on each device, and its results compared.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from ..compat.backend_name import GROUP, NAME, VALUE
from ..config import Config, runner_reason
from ..counting import counters
from ..errors import Dsv4Error
from ..ops.kernels import serve
from ..version import __version__

LEAST_TORCH = (2, 11)
DISTRIBUTION = "dsv4-compile"
ENTRY_POINT = (GROUP, NAME)
NOT_RUN = "the cuda engine has not run on a GPU yet (docs/hardware.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        problem: one line that says why the backend cannot be used, or None.
        facts: what was looked at and what it is, in order.
        not_run: what no hardware has shown.
    """

    problem: str | None
    facts: tuple[tuple[str, str], ...]
    not_run: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.facts)
        lines = [f"{name:<{width}}  {value}" for name, value in self.facts]
        lines += [f"{'not run':<{width}}  {item}" for item in self.not_run]
        lines.append("")
        lines.append(
            "the backend can be used" if self.problem is None else f"the backend cannot be used: {self.problem}"
        )
        return "\n".join(lines)

    def to_json(self) -> str:
        """The same for programs."""
        return json.dumps(
            {
                "usable": self.problem is None,
                "problem": self.problem,
                "facts": dict(self.facts),
                "not_run": self.not_run,
            },
            indent=2,
        )


def diagnose() -> Diagnosis:
    """Look at this machine and try the backend on each of its devices."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    config = Config()
    return Diagnosis(
        problem=old_torch(torch.__version__)
        or missing_entry_point()
        or next(filter(None, map(failed_trial, devices)), None),
        facts=(
            ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
            ("torch", torch.__version__),
            ("dsv4_compile", version_of(DISTRIBUTION)),
            ("transformers", version_of("transformers")),
            ("device", describe_devices()),
            ("engine", "auto: host for CPU inputs" + (", cuda for CUDA inputs" if "cuda" in devices else "")),
            ("entry point", describe_entry_point()),
            ("runner", f"{config.resolved_runner} ({runner_reason(config)})"),
            ("region", f"{config.resolved_region} (the default of {config.resolved_runner})"),
            ("pieces", ", ".join(f"{config.resolved_piece_compiler(device)} on {device}" for device in devices)),
            ("side streams", ", ".join(f"{config.resolved_aux_streams(device)} on {device}" for device in devices)),
            ("kernels", describe_kernels()),
            ("C++ compiler", describe_cxx()),
            *((("C compiler", describe_cc()),) if made_for() is not None else ()),
        ),
        not_run=(NOT_RUN,),
    )


def version_of(distribution: str) -> str:
    """The version of a distribution, which is not imported; that of this package also where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return __version__ if distribution == DISTRIBUTION else "not installed"


def is_installed() -> bool:
    """Whether this package is installed, or a folder on the path."""
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return False
    return True


def describe_entry_point() -> str:
    """How torch finds the backend by its name."""
    if not is_installed():
        return f"not installed: import dsv4_compile before torch.compile(model, backend={ENTRY_POINT[1]!r})"
    return missing_entry_point() or f"found: torch.compile(model, backend={ENTRY_POINT[1]!r})"


def describe_devices() -> str:
    """The GPUs, or the CPU; what torch was built for, since that may be a GPU which no driver shows."""
    built = made_for()
    if not torch.cuda.is_available():
        why = "" if built is None else f": torch is built for {built}, and finds no driver or no GPU (nvidia-smi?)"
        return f"CPU, {torch.get_num_threads()} threads; no CUDA device{why}"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)} ({built})"


def made_for() -> str | None:
    """What torch was built for beside CPUs."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def describe_cc() -> str:
    """What Triton would compile its launchers with, and Inductor uses Triton on a GPU: it looks in this order."""
    if find_spec("triton") is None:
        return "not asked for: no triton, which piece_compiler='inductor' needs on a GPU"
    wanted = os.environ.get("CC")
    found = wanted or next(filter(shutil.which, ("gcc", "clang")), None)
    if found is not None and shutil.which(found):
        return f"{found}, for Triton"
    missing = "neither gcc nor clang" if wanted is None else f"no {wanted}"
    return f"{missing}: piece_compiler='inductor' needs a C compiler for Triton; install one, or set CC"


def describe_kernels() -> str:
    """What computes the ops of this package on a GPU."""
    if serve.read_choice() == "torch":
        return f"plain torch, also on GPUs: {serve.VARIABLE}=torch"
    if not serve.KERNELS_SERVE:
        return f"plain torch, also on GPUs: {serve.NO_TRITON}"
    served = f"Triton {version_of('triton')}"
    return f"{served} on GPUs, though none has run them yet (docs/kernels.md); plain torch elsewhere"


def describe_cxx() -> str:
    """What Inductor would compile CPU code with."""
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    return wanted if found else f"no {wanted}: piece_compiler='inductor' needs one for the CPU; install it, or set CXX"


def old_torch(version: str) -> str | None:
    """Why this version of torch is too old, or None."""
    parts = tuple(int(part) for part in version.split(".")[:2])
    if parts >= LEAST_TORCH:
        return None
    least = ".".join(map(str, LEAST_TORCH))
    return f"torch {version} is older than {least}: install torch {least} or newer"


def missing_entry_point() -> str | None:
    """Why torch would not find the backend by its name, or None; where it is not installed, importing it is enough."""
    group, name = ENTRY_POINT
    found = [point.value for point in metadata.entry_points(group=group, name=name)]
    if not found and is_installed():
        return f"no entry point {name!r}: install the package again (pip install -e .), what is installed has none"
    others = [value for value in found if value != VALUE]
    return f"another package has an entry point {name!r}: {others[0]}" if others else None


def failed_trial(device: str) -> str | None:
    """Why compiling, capturing or replaying a small function fails on a device, or None."""
    options: dict[str, Any] = {"split_ops": ["aten::bmm"]}
    torch.compiler.reset()
    compiled = torch.compile(_trial, backend=ENTRY_POINT[1], dynamic=True, options=options)
    try:
        inputs = [torch.full((2, 3, 3), step + 1.0, device=device) for step in range(3)]  # warm-up, capture, replay
        with torch.no_grad(), counters.expect(uncaptured_calls=1, captures=1, replays=2):
            right = [torch.equal(compiled(x), _trial(x)) for x in inputs]
    except AssertionError as error:
        return f"a trial on {device} was not captured and replayed: {error}"
    except (Dsv4Error, RuntimeError, ImportError) as error:
        first_line = str(error).partition("\n")[0]
        return f"a trial on {device} failed: {type(error).__name__}: {first_line}"
    return None if all(right) else f"a trial on {device} gave wrong numbers in call {right.index(False) + 1}"


def _trial(x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x + 1, x) * 2
