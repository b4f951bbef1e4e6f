"""The repaired interpreter against torch, for every value where there are few: the other tests rest on it."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import HAS_TRITON, needs_interpreter

if HAS_TRITON:
    import triton
    import triton.language as tl

pytestmark = needs_interpreter
EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
EVERY_E4M3 = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)

if HAS_TRITON:

    @triton.jit
    def convert(x, out, count: tl.constexpr):
        place = tl.arange(0, count)
        tl.store(out + place, tl.load(x + place).to(out.dtype.element_ty))

    @triton.jit
    def operate(x, y, out, count: tl.constexpr, what: tl.constexpr):
        place = tl.arange(0, count)
        a = tl.load(x + place)
        b = tl.load(y + place)
        if what == "add":
            result = a + b
        elif what == "multiply":
            result = a * b
        elif what == "negate":
            result = -a
        else:
            result = tl.where(a < b, a, b)
        tl.store(out + place, result)

    @triton.jit
    def multiply(x, y, out, size: tl.constexpr):
        row = tl.arange(0, size)
        cells = row[:, None] * size + row[None, :]
        tl.store(out + cells, tl.dot(tl.load(x + cells), tl.load(y + cells)))


def converted(x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    convert[(1,)](x, out, count=x.numel())
    return out


def test_every_bf16_becomes_the_fp32_it_is():
    torch.testing.assert_close(converted(EVERY_BF16, torch.float32), EVERY_BF16.float(), rtol=0, atol=0, equal_nan=True)


def test_fp32_is_rounded_to_bf16_as_torch_rounds():
    x = torch.cat([EVERY_BF16.float()[:-1] * (1 + k * 2.0**-9) for k in (0, 1, 1.01, 2, 3)])
    x = torch.cat([x, torch.zeros((1 << 19) - x.numel())])
    torch.testing.assert_close(converted(x, torch.bfloat16), x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_every_e4m3_becomes_the_fp32_it_is():
    actual = converted(EVERY_E4M3, torch.float32)
    torch.testing.assert_close(actual, EVERY_E4M3.float(), rtol=0, atol=0, equal_nan=True)


def test_fp32_is_rounded_to_e4m3_and_saturates():
    x = torch.cat([EVERY_BF16.float(), EVERY_BF16.float() * 1.001])
    expected = torch.where(x.isnan(), x, x.clamp(-448, 448)).to(torch.float8_e4m3fn)
    actual = converted(x, torch.float8_e4m3fn)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("what", ["add", "multiply", "negate", "least"])
def test_arithmetic_and_comparison_of_bf16(what):
    x, y = EVERY_BF16, EVERY_BF16.flip(0)[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    out = torch.empty_like(x)
    operate[(1,)](x, y, out, count=x.numel(), what=what)
    expected = {"add": x + y, "multiply": x * y, "negate": -x, "least": torch.where(x < y, x, y)}[what]
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_products_of_matrices(dtype):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(32, 32, generator=g).to(dtype) for _ in range(2))
    out = torch.empty(32, 32)
    multiply[(1,)](x, y, out, size=32)
    torch.testing.assert_close(out, x.float() @ y.float())
