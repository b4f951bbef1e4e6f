"""Numbers of 8 and 4 bits with a shared scale: the fake-quant formulae, as codes and back, bit for bit.

A *group* of neighbours shares the scale s = 2^ceil(log2(max(amax, least) / largest)), the smallest power of two that
brings the group into range. It is stored as a ue8m0 byte, e + 127. Dividing by it is exact, so each value is rounded
once, to the nearest code, ties to the even one. What goes in is rounded to bf16 first: that is the precision of the
caches that these codes replace, and makes the codes the same whatever dtype the model computes in.

Note "not finite": where a group has a NaN or an infinity, the formula gives s = NaN or infinity, and with either every
value of the group becomes NaN. So it is here: the byte is 255, the NaN of ue8m0. No NaN is stored as a number.

Note "exact exponents": the scale is read off the bits of amax. With amax = m * 2^k and largest = n * 2^l, m and n in
[1, 2), it is 2^(k - l), and twice that if m > n. A logarithm may round across an integer just where amax is `largest`
times a power of two, and so may the quotient: torch divides by a number with its reciprocal on a GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3_LARGEST = 448.0
E4M3_LEAST = 1e-4  # floor of amax
E2M1_LARGEST = 6.0
E2M1_LEAST = 6.0 * 2.0**-126
NAN_SCALE = 255


def quantise_e4m3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups along the last dim, of which the last may be shorter.

    Args:
        x: [..., width], any floating dtype.
        group: values that share a scale.

    Returns:
        float8_e4m3fn [..., width] and ue8m0 bytes, uint8 [..., ceil(width / group)].
    """
    x = round_to_bf16(x)
    scales = _ue8m0(_group_max(x, group), E4M3_LEAST, E4M3_LARGEST)
    scaled = x / spread(scale_values(scales), group, x.shape[-1])
    return scaled.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn), scales


def dequantise_e4m3(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """fp32 [..., width] of float8_e4m3fn codes [..., width] and their ue8m0 bytes."""
    return codes.float() * spread(scale_values(scales), group, codes.shape[-1])


def quantise_e2m1(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of groups along the last dim, of which the last may be shorter.

    Args:
        x: [..., width], any floating dtype, width even.
        group: values that share a scale.

    Returns:
        Two codes a byte, the even element in the low half: uint8 [..., width / 2]; and ue8m0 bytes, uint8
        [..., ceil(width / group)].
    """
    x = round_to_bf16(x)
    scales = _ue8m0(_group_max(x, group), E2M1_LEAST, E2M1_LARGEST)
    codes = _e2m1(x / spread(scale_values(scales), group, x.shape[-1]))
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def dequantise_e2m1(pairs: Tensor, scales: Tensor, group: int) -> Tensor:
    """fp32 [..., width] of code pairs, uint8 [..., width / 2], and their ue8m0 bytes."""
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    return _e2m1_values(codes) * spread(scale_values(scales), group, codes.shape[-1])


def round_to_bf16(x: Tensor) -> Tensor:
    """fp32 values that bf16 has."""
    return x.to(torch.bfloat16).float()


def scale_values(scales: Tensor) -> Tensor:
    """fp32 of ue8m0 bytes: 2^(byte - 127), NaN for 255."""
    return scales.view(torch.float8_e8m0fnu).float()


def spread(scales: Tensor, group: int, width: int) -> Tensor:
    """The scale of each of `width` values: [..., width] of [..., at least ceil(width / group)]."""
    return scales.repeat_interleave(group, dim=-1)[..., :width]


def _group_max(x: Tensor, group: int) -> Tensor:
    """Largest absolute value of each group, NaN where there is one: [..., ceil(width / group)]."""
    groups = -(-x.shape[-1] // group)
    whole = torch.nn.functional.pad(x.abs(), (0, groups * group - x.shape[-1]))
    return whole.reshape(*x.shape[:-1], groups, group).amax(dim=-1)


def _ue8m0(amax: Tensor, least: float, largest: float) -> Tensor:
    """The byte of the smallest power of two that is at least max(amax, least) / largest; see both notes."""
    half, exponent = math.frexp(largest)  # a mantissa of [1/2, 1)
    bits = amax.clamp(min=least).view(torch.int32)
    biased, is_above = bits >> 23 & 0xFF, (bits & 0x7FFFFF) > int((2 * half - 1) * 2**23)
    return torch.where(biased == 255, NAN_SCALE, biased - (exponent - 1) + is_above).to(torch.uint8)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest codes of values within +-6: the sign in bit 3, then 0, 0.5, 1, 1.5, 2, 3, 4, 6; 0 for NaN."""
    size = x.abs()
    # a tie goes to the even one of two codes: it counts where the upper code is even
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5)
    return code | torch.signbit(x).to(torch.uint8) << 3


def _e2m1_values(codes: Tensor) -> Tensor:
    """fp32 of codes; no table, since a table in a graph would be copied from the host."""
    size = (codes & 7).float()
    values = torch.where(size < 4, size * 0.5, torch.where(size < 6, size - 2, size * 2 - 8))
    return torch.where(codes >= 8, -values, values)
