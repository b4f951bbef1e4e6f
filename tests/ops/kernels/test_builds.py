"""What kernels compile to for GPUs that are not here: no spills without a reason, tensor cores in the hot ones.

The default run compiles the sharpest cases for three architectures; the exhaustive one all cases of the whole table.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernel_tools import needs_compiler

from benchmarks.kernel_builds import Build, build_all, launches_of, table_of, why_bad
from benchmarks.kernel_cases import OPS, PREFILL_TOKENS, Case, compiled_cases

pytestmark = needs_compiler
TARGETS = pytest.mark.parametrize("architecture", ["sm_90", "sm_100", "gfx942"])
# of attention, what decides: selected keys in a decode of whole and of sharded layers, all keys, a prefill
ATTENTION = [("C4A", 64, 1), ("C4A", 16, 1), ("C128A", 64, 1), ("C4A", 64, PREFILL_TOKENS)]
SHARPEST = [
    case
    for case in compiled_cases()
    if case.model == "Flash" and (case.op != "forward_mqa" or (case.variant, case.heads, case.tokens) in ATTENTION)
]


def bad(cases, architecture):
    return [f"{one}: {reason}" for one in build_all(cases, [architecture]) if (reason := why_bad(one))]


@TARGETS
@pytest.mark.parametrize("op", OPS)
def test_builds_may_ship(op, architecture):
    assert bad([case for case in SHARPEST if case.op == op], architecture) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("op", OPS)
def test_every_build_may_ship(op, architecture):
    assert bad([case for case in compiled_cases() if case.op == op], architecture) == []


BUILD = Build(
    kernel="attend",
    architecture="sm_90",
    call="forward_mqa, C4A",
    constants={"HEADS": 64, "BLOCK_H": 64, "BLOCK_N": 32},
    warps=8,
    stages=2,
    registers=255,
    spilled=0,
    shared=1024,
    tensor_core=("wgmma.mma_async",),
    spills=None,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"spilled": 8}, "8 bytes of registers spill, and the table gives no reason"),
        ({"spilled": 8, "spills": "once at the end"}, None),
        ({"shared": 232449}, "232449 bytes of shared memory, of 232448"),
        ({"tensor_core": ()}, "no tensor-core instruction"),
        ({"tensor_core": (), "kernel": "rotate_back"}, None),
    ],
)
def test_what_may_not_ship_has_a_reason(changes, reason):
    assert why_bad(replace(BUILD, **changes)) == reason


def test_a_launch_is_a_launch_of_the_call():
    case = Case(op="forward_mqa", model="Flash", variant="C4A", tokens=1, context=131072, heads=64)
    attend, combine = launches_of(case, "sm_90")
    assert (attend.grid, combine.grid) == ((1, 1, 8), (1, 64))
    assert (attend.constants["SPLITS"], attend.constants["BLOCK_H"], attend.warps) == (8, 64, 8)


def test_the_table_has_a_row_for_a_build():
    table = table_of([BUILD, replace(BUILD, architecture="sm_100", registers=254)])
    assert table.columns == ("kernel", "first called for", "sm_90", "sm_100")
    wanted = ["255 / 0 / 1024; h64 n32 w8 s2 wgmma.mma_async", "254 / 0 / 1024; h64 n32 w8 s2 wgmma.mma_async"]
    assert table.rows == (("attend", "forward_mqa, C4A", *wanted),)
