"""Kernels compiled for GPUs that are not there: registers, spills, shared memory, tensor-core instructions.

    python -m benchmarks.kernel_builds                          all of them, for every architecture; minutes
    python -m benchmarks.kernel_builds --write docs/kernels.md  and the page says what came out

What is compiled is what a call would launch (`launches` of its record), with the types and the alignment that it has on
a GPU. ptxas comes with Triton. No GPU is asked anything, and nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from dsv4_compile.inspect.arguments import OneLineParser
from dsv4_compile.ops.cache_formats import PLAIN
from dsv4_compile.ops.kernels.launch import Argument, Constant, KernelLaunch
from dsv4_compile.ops.kernels.serve import NO_TRITON
from dsv4_compile.ops.kernels.table import SHARED_MEMORY

from .__main__ import replace_between_marks
from .kernel_cases import Case, compiled_cases
from .sections import Table

ARCHITECTURES = tuple(SHARED_MEMORY)
TYPES = {  # as Triton names them
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
HOT = ("attend", "score_blocks")  # kernels that must use tensor cores
TENSOR_CORE = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma_")
SHAPE = ("BLOCK_H", "BLOCK_N")
LEGEND = """Of each kernel: registers of a thread / bytes of them that spill / bytes of shared memory; then heads (h)
and keys (n) of a program, its warps (w) and stages (s), and its tensor-core instruction. Where there is a dash, what
that call launches is in another row."""
BEGIN = "<!-- begin: written by python -m benchmarks.kernel_builds, not by hand -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What came out of compiling a launch.

    Attributes:
        kernel: its name.
        architecture: for which it was compiled.
        call: which launches it.
        constants: of the launch.
        warps: of a program.
        stages: of the software pipeline.
        registers: of a thread.
        spilled: bytes of a thread's registers that had no place.
        shared: bytes of shared memory of a program.
        tensor_core: kinds of tensor-core instructions in it.
        spills: why registers may spill, None if they must not.
    """

    kernel: str
    architecture: str
    call: str
    constants: Mapping[str, Constant]
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    tensor_core: tuple[str, ...]
    spills: str | None


def launches_of(case: Case, architecture: str) -> list[KernelLaunch]:
    """What a call on that architecture would launch."""
    call = case.call("meta")
    reason = call.why_not()
    if reason is not None:
        raise ValueError(f"{case}: {reason}")
    return list(call.launches(architecture))


def key_of(launch: KernelLaunch) -> tuple[object, ...]:
    """Equal for launches that are compiled to the same code."""
    constants = tuple(launch.constants.items())
    return launch.kernel.__name__, constants, launch.warps, launch.stages, tuple(signature(launch).items())


def signature(launch: KernelLaunch) -> dict[str, str]:
    """The type of every parameter, as Triton would see it."""
    given: dict[str, Argument] = dict(zip((p.name for p in launch.kernel.params), launch.arguments, strict=False))
    return {p.name: "constexpr" if p.is_constexpr else _type(given[p.name]) for p in launch.kernel.params}


def _type(value: Argument) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


def _divisible(launch: KernelLaunch) -> dict[tuple[int], list[list[object]]]:
    """Which parameters Triton may take for multiples of 16."""
    found = {}
    for index, (parameter, value) in enumerate(zip(launch.kernel.params, launch.arguments, strict=False)):
        told = not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment
        if told and (isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)):
            found[(index,)] = [["tt.divisibility", 16]]
    return found


def build(launch: KernelLaunch, architecture: str, call: str) -> Build:
    """Compile a launch of a call for an architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    is_cuda = architecture.startswith("sm_")
    target = GPUTarget("cuda", int(architecture[3:]), 32) if is_cuda else GPUTarget("hip", architecture, 64)
    source = ASTSource(launch.kernel, signature(launch), dict(launch.constants), _divisible(launch))
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
    registers, spilled = _cuda_usage(log.getvalue()) if is_cuda else _hip_usage(compiled.asm["amdgcn"])
    text = compiled.asm["ptx" if is_cuda else "amdgcn"]
    return Build(
        kernel=launch.kernel.__name__,
        architecture=architecture,
        call=call,
        constants=launch.constants,
        warps=launch.warps,
        stages=launch.stages,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        tensor_core=tuple(sorted(set(TENSOR_CORE.findall(text)))),
        spills=launch.spills,
    )


def _cuda_usage(log: str) -> tuple[int, int]:
    """Registers and bytes that spills store, as ptxas says; the stack of a kernel holds other things too."""
    registers = re.findall(r"Used (\d+) registers", log)
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    if len(registers) != 1 or len(spilled) != 1:
        raise ValueError(f"ptxas said {log!r}")
    return int(registers[0]), int(spilled[0])


def _hip_usage(text: str) -> tuple[int, int]:
    used = {name: int(count) for name, count in re.findall(r"\.(\w+):\s+(\d+)", text)}
    return used["vgpr_count"], 4 * used["vgpr_spill_count"]


def build_all(cases: Iterable[Case], architectures: Sequence[str] = ARCHITECTURES) -> Iterator[Build]:
    """Compile what the cases launch, each specialisation once."""
    cases = tuple(cases)
    for architecture in architectures:
        seen = set()
        for case in cases:
            for launch in launches_of(case, architecture):
                if (key := key_of(launch)) not in seen:
                    seen.add(key)
                    yield build(launch, architecture, label(case))


def label(case: Case) -> str:
    """What a call is, as text."""
    parts = (case.op, case.variant, case.cache_format, case.model, f"{case.heads} heads", f"T = {case.tokens}")
    return ", ".join(part for part in parts if part != PLAIN)


def why_bad(build: Build) -> str | None:
    """Why a build may not ship, None if it may."""
    limit = SHARED_MEMORY[build.architecture]
    if build.shared > limit:
        return f"{build.shared} bytes of shared memory, of {limit}"
    if build.spilled and build.spills is None:
        return f"{build.spilled} bytes of registers spill, and the table gives no reason"
    if build.kernel in HOT and not build.tensor_core:
        return "no tensor-core instruction"
    return None


def table_of(builds: Iterable[Build]) -> Table:
    """A row for each kernel of each call, a column for each architecture; see `LEGEND`."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    architectures: dict[str, None] = {}
    for one in builds:
        architectures[one.architecture] = None
        shape = " ".join(f"{name[6:].lower()}{value}" for name, value in one.constants.items() if name in SHAPE)
        numbers = f"{one.registers} / {one.spilled} / {one.shared}"
        text = " ".join(filter(None, (f"{numbers};", shape, f"w{one.warps} s{one.stages}", *one.tensor_core)))
        rows.setdefault((one.kernel, one.call), {})[one.architecture] = text
    columns = ("kernel", "first called for", *architectures)
    return Table(
        columns, tuple((*key, *(cells.get(name, "-") for name in architectures)) for key, cells in rows.items())
    )


def page_of(builds: Sequence[Build]) -> str:
    """What the page says of them."""
    import triton

    spills = {
        f"{one.kernel} on {one.architecture} spills, which the table allows: {one.spills}."
        for one in builds
        if one.spilled
    }
    return "\n\n".join([f"Triton {triton.__version__}. {LEGEND}", *sorted(spills), str(table_of(builds))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile everything, print it, and write it where it is wanted; the exit code is 1 if something may not ship."""
    parser = OneLineParser(prog="python -m benchmarks.kernel_builds", description="Compile the kernels without a GPU.")
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES, help="one of them; default: all")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the marks of a page")
    options: argparse.Namespace = parser.parse_args(arguments)
    if find_spec("triton") is None:
        print(NO_TRITON)
        return 1
    builds = list(build_all(compiled_cases(), options.architecture or ARCHITECTURES))
    print(page_of(builds))
    if options.write:
        replace_between_marks(options.write, page_of(builds), BEGIN)
    bad = [f"{one.kernel} on {one.architecture}: {reason}" for one in builds if (reason := why_bad(one))]
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
