"""In which shape a kernel runs, by architecture, cache format and heads: decided here, and never tuned at run time.

Nothing below has been timed. The rows are those that compile without spilled registers (or with few, and why), into the
shared memory of the architecture, and with tensor-core instructions; `docs/kernels.md` has what came out for each.

| architecture | shared memory of a program | also taken for |
|---|---|---|
| sm_80 | 99 KiB, which those after it have too | every later one before Hopper, and consumer Blackwell |
| sm_90 | 227 KiB | |
| sm_100 | 227 KiB | sm_103 |
| gfx942 | 64 KiB | gfx90a, gfx950 |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

from ...log import log
from ..cache_formats import FP8, FP8_DS_MLA, MXFP4, PLAIN

HAVE_E4M3 = ("sm_90", "sm_100")  # GPUs that convert the type; elsewhere its codes are taken apart
SHARED_MEMORY = {"sm_80": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
# fewer programs than this leave multiprocessors idle, so the work of a token is split; one figure for all
# architectures (H100 and H200 have 132, B200 148, MI300X 304), since scratch is allocated before one is known
PROGRAMS = 152
MOST_SPLITS = 16
_EXACT = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}
_CDNA = {"gfx942": "gfx942", "gfx90a": "gfx942", "gfx950": "gfx942"}
_SPILLS_AT_THE_END = "fp32 partials leave tensor memory through registers, once after the loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The shape of a program of a matrix kernel.

    Attributes:
        heads: query heads of a program.
        keys: keys of one step of its loop.
        warps: of a program.
        stages: of the software pipeline.
        spills: why registers may spill, None if they must not.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    spills: str | None = None


Table: TypeAlias = Mapping[tuple[str, str], tuple[Tile, ...]]  # by architecture and format, in ascending order of heads
ATTENTION: Table = {
    ("sm_80", PLAIN): (
        Tile(heads=16, keys=16, warps=4, stages=2),
        Tile(heads=32, keys=32, warps=8, stages=2),
    ),
    ("sm_90", PLAIN): (
        Tile(heads=16, keys=32, warps=4, stages=2),
        Tile(heads=32, keys=32, warps=8, stages=2),
        Tile(heads=64, keys=32, warps=8, stages=3),
    ),
    ("sm_100", PLAIN): (
        Tile(heads=16, keys=32, warps=4, stages=2),
        Tile(heads=32, keys=32, warps=8, stages=2),
        Tile(heads=64, keys=32, warps=8, stages=3, spills=_SPILLS_AT_THE_END),
    ),
    ("gfx942", PLAIN): (
        Tile(heads=16, keys=32, warps=4, stages=2),
        Tile(heads=64, keys=16, warps=8, stages=2),
    ),
    ("sm_80", FP8_DS_MLA): (Tile(heads=16, keys=16, warps=8, stages=2),),
    ("sm_90", FP8_DS_MLA): (
        Tile(heads=16, keys=32, warps=8, stages=2),
        Tile(heads=64, keys=16, warps=8, stages=3),
    ),
    ("sm_100", FP8_DS_MLA): (
        Tile(heads=16, keys=32, warps=8, stages=2),
        Tile(heads=64, keys=32, warps=8, stages=2, spills=_SPILLS_AT_THE_END),
    ),
    ("gfx942", FP8_DS_MLA): (
        Tile(heads=16, keys=32, warps=4, stages=1),
        Tile(heads=64, keys=16, warps=8, stages=2),
    ),
}


# heads are those of the indexer, all in one program
INDEXER: Table = {
    ("sm_80", PLAIN): (Tile(heads=64, keys=64, warps=4, stages=3),),
    ("sm_90", PLAIN): (Tile(heads=64, keys=128, warps=4, stages=3),),
    ("sm_100", PLAIN): (Tile(heads=64, keys=128, warps=4, stages=3),),
    ("gfx942", PLAIN): (Tile(heads=64, keys=64, warps=4, stages=2),),
    ("sm_80", FP8): (Tile(heads=64, keys=64, warps=4, stages=3),),
    ("sm_90", FP8): (Tile(heads=64, keys=64, warps=4, stages=3),),
    ("sm_100", FP8): (Tile(heads=64, keys=64, warps=4, stages=3),),
    ("gfx942", FP8): (Tile(heads=64, keys=64, warps=4, stages=2),),
    ("sm_80", MXFP4): (Tile(heads=64, keys=64, warps=4, stages=3),),
    ("sm_90", MXFP4): (Tile(heads=64, keys=64, warps=4, stages=3),),
    ("sm_100", MXFP4): (Tile(heads=64, keys=64, warps=4, stages=3),),
    ("gfx942", MXFP4): (Tile(heads=64, keys=64, warps=4, stages=2),),
}


def row_for(table: Table, device: torch.device, cache_format: str, heads: int, architecture: str | None = None) -> Tile:
    """The smallest tile that takes all heads, or the largest.

    Args:
        table: of a kernel.
        device: whose architecture counts, and must have one.
        cache_format: of the caches.
        heads: of a token.
        architecture: counts in place of the device's.
    """
    tiles = table[architecture_for(device, architecture), cache_format]
    return next((tile for tile in tiles if tile.heads >= heads), tiles[-1])


def architecture_for(device: torch.device, architecture: str | None) -> str:
    """The one that is named, or the device's, which must have one."""
    found = architecture or architecture_of(device)
    assert found is not None, device  # `why_not` has said so
    return found


def choose_splits(programs: int, tiles: int) -> int:
    """Into how many shares the tiles of keys of a token are split: a power of two.

    Args:
        programs: how many there are without splitting.
        tiles: the most tiles of keys that a token has; each share gets two of them or more.
    """
    splits = 1
    while splits < MOST_SPLITS and splits * 4 <= tiles and programs * splits * 2 <= PROGRAMS:
        splits *= 2
    return splits


@cache
def architecture_of(device: torch.device) -> str | None:
    """The row of the table for a device, None if there is none; the nearest one is taken, and said once."""
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return "sm_90"  # of the interpreter, and of a device that is only planned for
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = properties.gcnArchName.partition(":")[0]
        found = _CDNA.get(name)
    else:
        name = f"sm_{properties.major}{properties.minor}"
        found = nearest(properties.major, properties.minor)
    if found is not None and found != name:
        log.warning("kernels for %s are those chosen for %s", name, found)
    return found


def nearest(major: int, minor: int) -> str | None:
    """The architecture whose rows a compute capability takes: one with as much shared memory at most."""
    if major < 8:
        return None  # no bf16 in tensor cores
    return _EXACT.get((major, minor), "sm_100" if major == 10 else "sm_80")
