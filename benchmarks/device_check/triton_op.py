# mypy: ignore-errors
# triton is not there where types are checked, and its decorator has none
"""An op with a Triton kernel, which Triton compiles anew for tensors of another alignment. Needs triton, and a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import Library

ADD_ONE = "hazard_triton::add_one"
_library = Library("hazard_triton", "DEF")
_library.define("add_one(Tensor x) -> Tensor")


@triton.jit
def _kernel(x, out, size, block: tl.constexpr):
    places = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + places, tl.load(x + places, mask=places < size) + 1, mask=places < size)


def _add_one(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), block=64)
    return out


_library.impl("add_one", _add_one, "CUDA")
torch.library.register_fake(ADD_ONE, torch.empty_like, lib=_library)
