"""How entries lie in a page of a paged cache: plain rows, or packed codes with their scales.

A cache is [num_blocks, rows, width]; a page is what one block index names. With plain rows ("auto") the width counts
elements of the cache's own dtype. The packed formats are uint8, the width counts bytes, and a page is divided by part
and not by row: first the data of all its rows, then the scales of all its rows.

| format | data of a row | scales of a row |
|---|---|---|
| `fp8_ds_mla` | e4m3 without RoPE, then bf16 with RoPE: 448 + 128 bytes | a ue8m0 byte for each 64, to 8 bytes: 7 + 1 |
| `fp8` | e4m3: 128 bytes | one fp32, a power of two: 4 bytes |
| `mxfp4` | e2m1, the even element in the low half of a byte: 64 bytes | a ue8m0 byte for each 32, to 4 bytes: 4 |

The bytes are those of the released models: 512 values of which 64 with RoPE, 128 for the indexer. Other sizes follow
the same rule. A block may be longer than its rows (`page_bytes`): stride(0) says so; the bytes between are nobody's.

What the codes mean, and what becomes of NaN and infinity, is in `_quantise.py`. The indexer's queries have its key
format, since the product is taken in it, except that the scale of an fp8 query goes into its head weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._paging import read_rows, write_rows
from ._quantise import dequantise_e2m1, dequantise_e4m3, quantise_e2m1, quantise_e4m3, scale_values

PLAIN = "auto"
FP8_DS_MLA = "fp8_ds_mla"
FP8 = "fp8"
MXFP4 = "mxfp4"
KV_FORMATS = (PLAIN, FP8_DS_MLA)
INDEX_FORMATS = (PLAIN, FP8, MXFP4)
MLA_GROUP = 64
MXFP4_GROUP = 32
# One row of fp8_ds_mla data of the released models: kernels address a page in units of it.
FP8_DS_MLA_ALIGNMENT = 576
PLAIN_ALIGNMENT = 512
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def row_parts(cache_format: str, width: int, rope_dims: int = 0) -> tuple[int, int]:
    """Bytes of data and of scales of one row of a packed format.

    Args:
        cache_format: "fp8_ds_mla", "fp8" or "mxfp4".
        width: values of an entry.
        rope_dims: of them with RoPE; for "fp8_ds_mla" only.
    """
    if cache_format == FP8_DS_MLA:
        return width + rope_dims, _round_up(_groups(width - rope_dims, MLA_GROUP), 8)
    if cache_format == FP8:
        return width, 4
    return width // 2, _round_up(_groups(width, MXFP4_GROUP), 4)


def row_bytes(cache_format: str, width: int, rope_dims: int = 0) -> int:
    """Bytes of one row of a packed format; see `row_parts`."""
    return sum(row_parts(cache_format, width, rope_dims))


def page_bytes(rows: int, bytes_a_row: int, alignment: int) -> int:
    """Bytes from one page to the next."""
    return _round_up(rows * bytes_a_row, alignment)


def pack(x: Tensor, cache_format: str, rope_dims: int = 0) -> tuple[Tensor, Tensor]:
    """Entries as the data and the scales of a packed format.

    Args:
        x: [..., width], rotated; rounded to bf16 first.
        cache_format: "fp8_ds_mla", "fp8" or "mxfp4".
        rope_dims: the last dims, which "fp8_ds_mla" keeps in bf16.

    Returns:
        uint8 [..., data bytes] and [..., scale bytes].
    """
    if cache_format == FP8_DS_MLA:
        plain, rotated = x[..., : x.shape[-1] - rope_dims], x[..., x.shape[-1] - rope_dims :]
        codes, scales = quantise_e4m3(plain, MLA_GROUP)
        kept = _seen_as(torch.uint8, rotated.to(torch.bfloat16))
        return torch.cat([codes.view(torch.uint8), kept], dim=-1), _pad_to(scales, 8)
    if cache_format == FP8:
        codes, scales = quantise_e4m3(x, x.shape[-1])
        return codes.view(torch.uint8), _seen_as(torch.uint8, scale_values(scales))
    codes, scales = quantise_e2m1(x, MXFP4_GROUP)
    return codes, _pad_to(scales, 4)


def unpack(data: Tensor, scales: Tensor, cache_format: str, rope_dims: int = 0) -> Tensor:
    """Entries of their data and scales, uint8 [..., bytes] each: bf16 for "fp8_ds_mla", else fp32, [..., width]."""
    if cache_format == FP8_DS_MLA:
        width = data.shape[-1] - 2 * rope_dims
        codes = data[..., :width].view(torch.float8_e4m3fn)
        kept = _seen_as(torch.bfloat16, data[..., width:])
        return torch.cat([dequantise_e4m3(codes, scales, MLA_GROUP).to(torch.bfloat16), kept], dim=-1)
    if cache_format == FP8:
        return data.view(torch.float8_e4m3fn).float() * _seen_as(torch.float32, scales)
    return dequantise_e2m1(data, scales, MXFP4_GROUP)


def insert_entries(cache: Tensor, slots: Tensor, x: Tensor, cache_format: str, rope_dims: int = 0) -> None:
    """Write entries x [T, width] to slots [T] of a cache of any format, skipping -1; the cache is checked already."""
    if cache_format == PLAIN:
        write_rows(cache, slots, x)
        return
    data, scales = pack(x, cache_format, rope_dims)
    data_part, scale_part = _parts_of(cache, cache_format, x.shape[-1], rope_dims)
    write_rows(data_part, slots, data)
    write_rows(scale_part, slots, scales)


def gather_entries(cache: Tensor, slots: Tensor, width: int, cache_format: str, rope_dims: int = 0) -> Tensor:
    """Entries at slots of any shape, zero where the slot is -1 whatever the cache holds: [*slots.shape, width].

    Their dtype is that of the cache, or what `unpack` gives; the cache is checked already.
    """
    if cache_format == PLAIN:
        return read_rows(cache, slots)
    data, scales = (read_rows(part, slots) for part in _parts_of(cache, cache_format, width, rope_dims))
    return unpack(data, scales, cache_format, rope_dims)


def query_width(queries: Tensor, cache_format: str) -> int:
    """Values of a query of the indexer."""
    return queries.shape[-1] * (2 if cache_format == MXFP4 else 1)


def empty_queries(queries: Tensor, cache_format: str) -> tuple[Tensor, Tensor | None]:
    """Where `indexer_q_rope` may put queries [T, heads, width] and their scales in the format of the keys."""
    if cache_format == FP8:
        return torch.empty_like(queries, dtype=torch.float8_e4m3fn), None
    if cache_format == MXFP4:
        num_tokens, num_heads, width = queries.shape
        data, scales = row_parts(MXFP4, width)
        return (
            queries.new_empty(num_tokens, num_heads, data, dtype=torch.uint8),
            queries.new_empty(num_tokens, num_heads, scales, dtype=torch.uint8),
        )
    return torch.empty_like(queries), None


def unpack_queries(queries: Tensor, scales: Tensor | None, cache_format: str) -> Tensor:
    """fp32 [..., width] of queries in the format of the keys; those of "fp8" without their scale."""
    return queries.float() if scales is None else unpack(queries, scales, cache_format)


def check_format(op: str, argument: str, cache_format: str, known: Sequence[str]) -> None:
    """Refuse a format that an op does not have.

    Raises:
        ArgumentError: naming those it has.
    """
    if cache_format not in known:
        from ..errors import ArgumentError, did_you_mean

        raise ArgumentError(
            f"{op}: unknown {argument} {cache_format!r}{did_you_mean(cache_format, known)} "
            f"It takes {', '.join(map(repr, known))}"
        )


def check_queries(op: str, argument: str, queries: Tensor, scales: Tensor | None, cache_format: str) -> None:
    """Refuse queries of the indexer, or their scales, that are not in a format.

    Raises:
        ArgumentError: saying what they are, and what they must be.
    """
    reason = why_not_queries(queries, scales, cache_format)
    if reason is not None:
        from ..errors import ArgumentError

        raise ArgumentError(f"{op}: {argument} is {reason}")


def why_not_queries(queries: Tensor, scales: Tensor | None, cache_format: str) -> str | None:
    """What queries of the indexer and their scales are, and have to be, if they are not in a format; else None."""
    dtypes = {FP8: (torch.float8_e4m3fn,), MXFP4: (torch.uint8,)}.get(cache_format, _PLAIN_DTYPES)
    wanted = None
    if cache_format == MXFP4:
        wanted = (*queries.shape[:-1], row_parts(MXFP4, 2 * queries.shape[-1])[1])
    given = None if scales is None else tuple(scales.shape)
    if queries.dtype in dtypes and given == wanted and (scales is None or scales.dtype is torch.uint8):
        return None
    has = "no scales" if scales is None else f"scales {scales.dtype} {list(scales.shape)}"
    takes = "no scales" if wanted is None else f"scales torch.uint8 {list(wanted)}"
    return (
        f"{queries.dtype} with {has}; index_cache_dtype {cache_format!r} takes "
        f"{' or '.join(map(str, dtypes))} with {takes}"
    )


def check_cache(op: str, argument: str, cache: Tensor, cache_format: str, width: int, rope_dims: int = 0) -> None:
    """Refuse a cache that is not laid out as a format says.

    Raises:
        CacheBindingError: another dtype or width, or rows that do not lie one after another.
    """
    reason = why_not_laid_out(cache, cache_format, width, rope_dims)
    if reason is not None:
        from ..errors import CacheBindingError

        raise CacheBindingError(f"{op}: {argument} is {reason}")


def why_not_laid_out(cache: Tensor, cache_format: str, width: int, rope_dims: int = 0) -> str | None:
    """What a cache is, and what it has to be, if it is not laid out as a format says; None if it is."""
    packed = cache_format != PLAIN
    wanted = row_bytes(cache_format, width, rope_dims) if packed else width
    dtypes = (torch.uint8,) if packed else _PLAIN_DTYPES
    if cache.dim() == 3 and cache.shape[2] == wanted and cache.dtype in dtypes:
        if not packed or cache.shape[0] == 0 or cache.stride()[1:] == (wanted, 1):
            return None
        return (
            f"strided {tuple(cache.stride())}; a page of {cache_format!r} must be {wanted} bytes a row, row after row"
        )
    given = f"{cache.dtype} {list(cache.shape)}"
    unit = "bytes of torch.uint8" if packed else "elements of a floating dtype of 2 bytes or more"
    return f"{given}; {cache_format!r} entries of {width} values take [num_blocks, rows, {wanted}] {unit}"


def _parts_of(cache: Tensor, cache_format: str, width: int, rope_dims: int) -> tuple[Tensor, Tensor]:
    """Views of the data and the scales of all pages: [num_blocks, rows, bytes] each."""
    num_blocks, rows, _ = cache.shape
    data, scales = row_parts(cache_format, width, rope_dims)
    pages = cache.view(num_blocks, rows * (data + scales))  # an error where it would be a copy
    return (
        pages[:, : rows * data].view(num_blocks, rows, data),
        pages[:, rows * data :].view(num_blocks, rows, scales),
    )


def _seen_as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """The bytes of the last dim as another dtype. By way of one dim: that of no rows may have any stride."""
    return x.reshape(-1).view(dtype).view(*x.shape[:-1], x.shape[-1] * x.element_size() // dtype.itemsize)


def _pad_to(x: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % multiple))


def _groups(width: int, group: int) -> int:
    return -(-width // group)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
