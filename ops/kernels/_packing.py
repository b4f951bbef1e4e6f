"""Packed formats on the device: codes and scales of `cache_formats.py`, bit for bit as `_quantise.py` makes them.

Codes are made and, on GPUs without such a type, read by arithmetic on bits, which is the same everywhere. Scales are
powers of two, so taking a code for a number, or multiplying bf16 by its scale, rounds nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

MLA_GROUP = tl.constexpr(64)
MLA_SCALES = tl.constexpr(8)  # bytes of a row's scales
MXFP4_GROUP = tl.constexpr(32)
MXFP4_SCALES = tl.constexpr(4)
NAN_SCALE = tl.constexpr(255)


@triton.jit
def scale_value(exponent):
    """fp32 of ue8m0 bytes (int32) of at least 1."""
    return tl.where(exponent == NAN_SCALE, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def inverse_scale(exponent):
    """One over `scale_value`, exactly, for bytes up to 253: no group of finite numbers has a greater one."""
    return tl.where(exponent == NAN_SCALE, float("nan"), ((254 - exponent) << 23).to(tl.float32, bitcast=True))


@triton.jit
def group_exponent(x, LEAST: tl.constexpr, MANTISSA: tl.constexpr, POWER: tl.constexpr):
    """ue8m0 bytes (int32) of groups x [groups, size], fp32: the least power of two that brings each into range.

    Args:
        x: groups of values.
        LEAST: floor of their greatest size.
        MANTISSA: of the format's largest number, as bits of fp32.
        POWER: and its exponent.
    """
    greatest = tl.max(tl.abs(x), 1)
    is_nan = tl.max((x != x).to(tl.int32), 1) > 0
    bits = tl.maximum(greatest, LEAST).to(tl.int32, bitcast=True)
    biased = bits >> 23
    exponent = biased - POWER + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)
    return tl.where(is_nan | (biased == 255), NAN_SCALE, exponent)


@triton.jit
def e4m3_codes(x):
    """e4m3 codes (int32) of fp32 within +-448, to the nearest, ties to even; what is outside saturates."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    normal = size.to(tl.int32, bitcast=True)
    normal = ((normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20) - 960  # exponents are biased by 127, those of e4m3 by 7
    # numbers below 2^-6 are multiples of 2^-9: adding 2^23 to such a multiple leaves it in the last bits, rounded
    tiny = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    codes = sign | tl.where(size < 0.015625, tiny, normal)
    return tl.where(x != x, 0x7F, codes)


@triton.jit
def e4m3_values(codes):
    """fp32 of e4m3 codes (int32) that are no NaN; those of a NaN have a scale that is one."""
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, the difference of the two biases


@triton.jit
def e2m1_codes(x):
    """e2m1 codes (int32) of fp32 within +-6: a tie goes to the even one of two codes; 0 for NaN."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_values(codes):
    """fp32 of e2m1 codes (int32)."""
    code = codes & 7
    size = code.to(tl.float32)
    size = tl.where(code < 4, size * 0.5, tl.where(code < 6, size - 2.0, size * 2.0 - 8.0))
    return tl.where(codes >= 8, -size, size)


@triton.jit
def quantise_e4m3(x):
    """Codes and ue8m0 bytes [groups] of x, fp32 [groups, size]."""
    x = x.to(tl.bfloat16).to(tl.float32)
    exponent = group_exponent(x, 1e-4, 0x600000, 8)  # 448 = 1.75 * 2^8
    return e4m3_codes(x * inverse_scale(exponent)[:, None]), exponent


@triton.jit
def quantise_e2m1(x, GROUPS: tl.constexpr):
    """Pairs of codes [GROUPS, 16] and ue8m0 bytes [GROUPS] of x, fp32 [GROUPS, 32]."""
    x = x.to(tl.bfloat16).to(tl.float32)
    exponent = group_exponent(x, 7.052966104933725e-38, 0x400000, 2)  # 6 = 1.5 * 2^2, and the floor is 6 * 2^-126
    codes = e2m1_codes(x * inverse_scale(exponent)[:, None])
    low, high = tl.split(tl.reshape(codes, (GROUPS, MXFP4_GROUP // 2, 2)))
    return low | (high << 4), exponent


@triton.jit
def store_scales(scales, exponent, GROUPS: tl.constexpr, BYTES: tl.constexpr):
    """Write a row's ue8m0 bytes [GROUPS], and zeros up to BYTES."""
    tl.store(scales + tl.arange(0, GROUPS), exponent.to(tl.uint8))
    if GROUPS < BYTES:
        byte = tl.arange(0, BYTES)
        tl.store(scales + byte, tl.zeros((BYTES,), tl.uint8), mask=byte >= GROUPS)


@triton.jit
def store_entry(
    cache, slot, page, x, FORMAT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr
):
    """Write one entry to a slot of a cache.

    Args:
        cache: pointer to its elements, or bytes of a packed format.
        slot: at least 0.
        page: elements, or bytes, from one page to the next.
        x: fp32 [1, WIDTH], rotated.
        FORMAT: of the cache.
        ROWS: of a page.
        WIDTH: values of an entry.
        ROPE: of them rotated, the last ones.
    """
    start = cache + slot // ROWS * page
    row = slot % ROWS
    if FORMAT == "auto":
        tl.store(start + row * WIDTH + tl.arange(0, WIDTH)[None, :], x.to(cache.dtype.element_ty))
    elif FORMAT == "fp8_ds_mla":
        GROUPS: tl.constexpr = WIDTH // MLA_GROUP
        group = tl.arange(0, GROUPS)
        column = tl.reshape(tl.arange(0, WIDTH), (GROUPS, MLA_GROUP))
        x = tl.reshape(x, (GROUPS, MLA_GROUP))
        plain = column < WIDTH - ROPE
        codes, exponent = quantise_e4m3(tl.where(plain, x, 0.0))
        exponent = tl.where(group * MLA_GROUP < WIDTH - ROPE, exponent, 0)
        data = start + row * (WIDTH + ROPE)
        tl.store(data + column, codes.to(tl.uint8), mask=plain)
        rotated = (data + (WIDTH - ROPE)).to(tl.pointer_type(tl.bfloat16))
        tl.store(rotated + (column - (WIDTH - ROPE)), x.to(tl.bfloat16), mask=column >= WIDTH - ROPE)
        scales = start + ROWS * (WIDTH + ROPE) + row * MLA_SCALES
        store_scales(scales, exponent, GROUPS, MLA_SCALES)
    elif FORMAT == "fp8":
        codes, exponent = quantise_e4m3(x)
        tl.store(start + row * WIDTH + tl.arange(0, WIDTH)[None, :], codes.to(tl.uint8))
        scales = (start + ROWS * WIDTH).to(tl.pointer_type(tl.float32))
        tl.store(scales + row + tl.arange(0, 1), scale_value(exponent))
    else:
        PARTS: tl.constexpr = WIDTH // MXFP4_GROUP
        codes, exponent = quantise_e2m1(tl.reshape(x, (PARTS, MXFP4_GROUP)), PARTS)
        place = tl.reshape(tl.arange(0, WIDTH // 2), (PARTS, MXFP4_GROUP // 2))
        tl.store(start + row * (WIDTH // 2) + place, codes.to(tl.uint8))
        scales = start + ROWS * (WIDTH // 2) + row * MXFP4_SCALES
        store_scales(scales, exponent, PARTS, MXFP4_SCALES)


@triton.jit
def load_mla_keys(
    start, scales, there, NATIVE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr
):
    """bf16 [KEYS, WIDTH] of rows of "fp8_ds_mla", zero where there is none.

    Args:
        start: pointers to the bytes of the rows, [KEYS].
        scales: pointers to their scales.
        there: mask.
        NATIVE: the GPU has the type e4m3.
        KEYS: rows.
        WIDTH: values of an entry.
        ROPE: of them bf16, the last ones.
    """
    GROUPS: tl.constexpr = WIDTH // MLA_GROUP
    width = tl.arange(0, WIDTH)
    plain = width < WIDTH - ROPE
    coded = there[:, None] & plain[None, :]
    if NATIVE:
        codes = start.to(tl.pointer_type(tl.float8e4nv))[:, None] + width[None, :]
        values = tl.load(codes, mask=coded, other=0.0).to(tl.bfloat16)
    else:
        values = e4m3_values(tl.load(start[:, None] + width[None, :], mask=coded, other=0).to(tl.int32)).to(tl.bfloat16)
    group = tl.arange(0, GROUPS)
    scaled = there[:, None] & (group * MLA_GROUP < WIDTH - ROPE)[None, :]
    exponent = tl.load(scales[:, None] + group[None, :], mask=scaled, other=127).to(tl.int16)
    scale = tl.where(exponent == NAN_SCALE, 0x7FC0, exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    values = tl.reshape(tl.reshape(values, (KEYS, GROUPS, MLA_GROUP)) * scale[:, :, None], (KEYS, WIDTH))
    rotated = (start + (WIDTH - ROPE)).to(tl.pointer_type(tl.bfloat16))[:, None] + (width - (WIDTH - ROPE))[None, :]
    return tl.where(plain[None, :], values, tl.load(rotated, mask=there[:, None] & ~plain[None, :], other=0.0))


@triton.jit
def load_e4m3(start, there, NATIVE: tl.constexpr, WIDTH: tl.constexpr):
    """bf16 [rows, WIDTH] of e4m3 codes, without their scales: pointers to the bytes of rows, and which there are."""
    width = tl.arange(0, WIDTH)
    if NATIVE:
        codes = start.to(tl.pointer_type(tl.float8e4nv))[:, None] + width[None, :]
        return tl.load(codes, mask=there[:, None], other=0.0).to(tl.bfloat16)
    codes = start[:, None] + width[None, :]
    return e4m3_values(tl.load(codes, mask=there[:, None], other=0).to(tl.int32)).to(tl.bfloat16)


@triton.jit
def load_mxfp4(start, scales, there, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """bf16 [KEYS, WIDTH] of rows of "mxfp4": pointers to their codes and to their scales, and which there are."""
    GROUPS: tl.constexpr = WIDTH // MXFP4_GROUP
    byte = tl.arange(0, WIDTH // 2)
    codes = tl.load(start[:, None] + byte[None, :], mask=there[:, None], other=0).to(tl.int32)
    exponent = tl.load(scales[:, None] + tl.arange(0, GROUPS)[None, :], mask=there[:, None], other=127).to(tl.int32)
    values = tl.reshape(tl.join(e2m1_values(codes & 15), e2m1_values(codes >> 4)), (KEYS, GROUPS, MXFP4_GROUP))
    return tl.reshape((values * scale_value(exponent)[:, :, None]).to(tl.bfloat16), (KEYS, WIDTH))
