"""Codes of 8 and 4 bits against tables made bit by bit, over every value of bf16, every code and every scale."""

import pytest
import torch
from _rounding import fake_fp4, fake_fp8

from dsv4_compile.ops._quantise import (
    dequantise_e2m1,
    dequantise_e4m3,
    quantise_e2m1,
    quantise_e4m3,
    scale_values,
)

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# sign apart: 4 bits of exponent with bias 7, 3 of mantissa, no infinity, 0x7f is NaN
E4M3 = torch.tensor([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:-1])
EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
FINITE = EVERY_BF16[EVERY_BF16.isfinite()]
ONE_SCALE = 127


def nearest(x, table):
    """Indices of the nearest entries of an ascending table, of two as near the even one."""
    upper = torch.searchsorted(table, x.abs().contiguous()).clamp(1, len(table) - 1)
    below, above = x.abs() - table[upper - 1], table[upper] - x.abs()
    takes_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return torch.where(takes_upper, upper, upper - 1)


def within(largest):
    """Every bf16 value of at most that size, in groups whose largest value makes the scale 1."""
    values = FINITE[FINITE.abs() <= largest].double()
    return torch.stack([values, torch.full_like(values, largest)], dim=-1)


def same_bits(a, b):
    return torch.equal(a.float().view(torch.int32), b.float().view(torch.int32))


def test_every_value_becomes_the_nearest_e4m3():
    groups = within(448.0)
    codes, scales = quantise_e4m3(groups, 2)
    assert (scales == ONE_SCALE).all()
    sign = torch.signbit(groups).int() << 7
    assert torch.equal(codes.view(torch.uint8).int(), nearest(groups, E4M3.double()).int() | sign)


def test_every_value_becomes_the_nearest_e2m1():
    groups = within(6.0)
    pairs, scales = quantise_e2m1(groups, 2)
    assert (scales == ONE_SCALE).all()
    sign = torch.signbit(groups).int() << 3
    codes = nearest(groups, E2M1.double()).int() | sign
    assert torch.equal(pairs.squeeze(-1).int(), codes[:, 0] | codes[:, 1] << 4)


def test_ties_of_e2m1_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    given = dequantise_e2m1(*quantise_e2m1(torch.cat([ties, -ties]), 16), 16)
    assert given.tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -1, -1, -2, -2, -4, -4, -6]


def test_every_code_has_its_value():
    codes = torch.arange(256, dtype=torch.uint8)
    one = torch.full((1,), ONE_SCALE, dtype=torch.uint8)
    values = dequantise_e4m3(codes.view(torch.float8_e4m3fn), one, 256)
    nan = torch.tensor([float("nan")])
    assert torch.equal(values.nan_to_num(999), torch.cat([E4M3, nan, -E4M3, nan]).nan_to_num(999))
    # pairs in the order of their bytes: the low half is the even element
    pairs = dequantise_e2m1(codes.unsqueeze(-1), one.expand(256, 1), 2)
    signed = torch.cat([E2M1, -E2M1])
    assert same_bits(pairs, torch.stack([signed.repeat(16), signed.repeat_interleave(16)], dim=-1))


def test_every_scale_byte_is_a_power_of_two_and_the_last_is_nan():
    values = scale_values(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()


@pytest.mark.parametrize(
    ("quantise", "floor", "largest"), [(quantise_e4m3, 1e-4, 448.0), (quantise_e2m1, 6 * 2.0**-126, 6.0)]
)
def test_the_scale_of_every_largest_value_is_the_smallest_that_holds_it(quantise, floor, largest):
    groups = torch.stack([FINITE, FINITE / 4], dim=-1)
    bytes_ = quantise(groups, 2)[1].squeeze(-1).int()
    amax = FINITE.double().abs().clamp(min=float(torch.tensor(floor)))
    scale = 2.0 ** (bytes_.double() - 127)
    assert bytes_.max() < 255
    assert (amax <= largest * scale).all()
    assert (amax > largest * scale / 2).all()


def test_scales_at_a_power_of_two_times_the_largest_value_and_beside_it():
    for exponent in range(-20, 100):
        exact = torch.tensor([448.0, 450.0, 446.0]).mul(2.0**exponent).unsqueeze(-1)
        assert (quantise_e4m3(exact, 1)[1] - 127).squeeze(-1).to(torch.int8).tolist() == [
            exponent,
            exponent + 1,
            exponent,
        ]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_zero_keeps_its_sign_and_takes_the_least_scale(sign):
    zeros = torch.full((4,), 0.0) * sign
    codes, scales = quantise_e4m3(zeros, 4)
    assert scales.tolist() == [127 - 22]  # 1e-4 / 448 is a bit less than 2^-22
    assert same_bits(dequantise_e4m3(codes, scales, 4), zeros)
    pairs, scales = quantise_e2m1(zeros, 4)
    assert scales.tolist() == [127 - 126]
    assert same_bits(dequantise_e2m1(pairs, scales, 4), zeros)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(bad):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, bad, 5.0, 0.0, -6.0, 1.0, 2.0, 3.0, 4.0])
    for quantise, dequantise in ((quantise_e4m3, dequantise_e4m3), (quantise_e2m1, dequantise_e2m1)):
        codes, scales = quantise(x, 4)
        assert (scales == 255).tolist() == [False, True, False]
        values = dequantise(codes, scales, 4)
        assert values[4:8].isnan().all()
        assert torch.equal(torch.cat([values[:4], values[8:]]), torch.cat([x[:4], x[8:]]))


def every_kind_of_number(width):
    """Rows of random size from the least to the largest exponent, with zeros, subnormals and the ends of bf16."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(4000, width, generator=generator)
    rows *= 2.0 ** torch.randint(-140, 127, (4000, 1), generator=generator)
    rows *= 2.0 ** torch.randint(-12, 1, rows.shape, generator=generator)
    rows[torch.rand(rows.shape, generator=generator) < 0.1] = 0
    rows[:4] = torch.tensor([torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny, 2.0**-133, 0])[:, None]
    return rows.clamp(-torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).max)


@pytest.mark.parametrize(("width", "group"), [(448, 64), (12, 64), (100, 64), (128, 128), (14, 14)])
def test_e4m3_there_and_back_is_the_fake_quant_formula(width, group):
    x = every_kind_of_number(width)
    codes, scales = quantise_e4m3(x, group)
    assert scales.shape == (4000, -(-width // group))
    assert same_bits(dequantise_e4m3(codes, scales, group), fake_fp8(x.bfloat16(), group))


@pytest.mark.parametrize("width", [128, 14, 40])
def test_e2m1_there_and_back_is_the_fake_quant_formula(width):
    x = every_kind_of_number(width)
    pairs, scales = quantise_e2m1(x, 32)
    assert (pairs.shape, scales.shape) == ((4000, width // 2), (4000, -(-width // 32)))
    assert same_bits(dequantise_e2m1(pairs, scales, 32), fake_fp4(x.bfloat16(), 32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("quantise", [quantise_e4m3, quantise_e2m1])
def test_a_gpu_makes_the_codes_of_the_cpu(quantise):
    groups = torch.cat([EVERY_BF16.unsqueeze(-1), EVERY_BF16.roll(4321).unsqueeze(-1)], dim=-1)
    for on_gpu, on_cpu in zip(quantise(groups.cuda(), 2), quantise(groups, 2), strict=True):
        assert torch.equal(on_gpu.cpu().float().nan_to_num(999), on_cpu.float().nan_to_num(999))
