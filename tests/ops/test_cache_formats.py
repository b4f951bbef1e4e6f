"""Pages of the packed formats, byte by byte: where a value lies, what an insert touches, what a gather may not read."""

import pytest
import torch
from _rounding import round_index, round_kv
from op_samples import sample

from dsv4_compile.errors import ArgumentError, CacheBindingError
from dsv4_compile.ops._quantise import quantise_e2m1, quantise_e4m3
from dsv4_compile.ops.cache_formats import (
    gather_entries,
    insert_entries,
    pack,
    page_bytes,
    row_bytes,
    row_parts,
    unpack,
    why_not_laid_out,
)

RELEASED = {"fp8_ds_mla": (512, 64), "fp8": (128, 64), "mxfp4": (128, 64)}
FORMATS = pytest.mark.parametrize("cache_format", RELEASED)


def make_cache(cache_format, *, width=None, rope_dims=None, blocks=3, rows=4, alignment=576, fill=255):
    """Pages full of one byte, and the storage they lie in: [blocks, bytes from page to page]."""
    if width is None:
        width, rope_dims = RELEASED[cache_format]
    each = row_bytes(cache_format, width, rope_dims)
    pages = torch.full((blocks, page_bytes(rows, each, alignment)), fill, dtype=torch.uint8)
    return pages[:, : rows * each].unflatten(1, (rows, each)), pages


@pytest.mark.parametrize(
    ("cache_format", "rows", "parts", "raw", "padded"),
    [
        ("fp8_ds_mla", 64, (576, 8), 37376, 37440),
        ("fp8_ds_mla", 2, (576, 8), 1168, 1728),
        ("fp8", 64, (128, 4), 8448, 8640),
        ("mxfp4", 64, (64, 4), 4352, 4608),
    ],
)
def test_pages_of_the_released_models(cache_format, rows, parts, raw, padded):
    width, rope_dims = RELEASED[cache_format]
    assert row_parts(cache_format, width, rope_dims) == parts
    assert rows * row_bytes(cache_format, width, rope_dims) == raw
    assert page_bytes(rows, sum(parts), 576) == padded


def test_an_fp8_ds_mla_entry_lies_where_kernels_read_it():
    cache, pages = make_cache("fp8_ds_mla")
    x = torch.randn(1, 512)
    insert_entries(cache, torch.tensor([2 * 4 + 3]), x, "fp8_ds_mla", 64)
    codes, scales = quantise_e4m3(x[:, :448], 64)
    storage, page = pages.flatten(), 2 * pages.stride(0)
    data, scale = page + 3 * 576, page + 4 * 576 + 3 * 8
    assert torch.equal(storage[data : data + 448], codes.view(torch.uint8)[0])
    assert torch.equal(storage[data + 448 : data + 576].view(torch.bfloat16), x[0, 448:].bfloat16())
    assert storage[scale : scale + 8].tolist() == [*scales[0].tolist(), 0]
    written = {*range(data, data + 576), *range(scale, scale + 8)}
    assert all(byte == 255 for index, byte in enumerate(storage.tolist()) if index not in written)


def test_an_fp8_index_key_has_one_fp32_scale_behind_all_keys():
    cache, pages = make_cache("fp8")
    x = torch.randn(1, 128)
    insert_entries(cache, torch.tensor([1 * 4 + 2]), x, "fp8", 64)
    codes, scales = quantise_e4m3(x, 128)
    page = pages[1]
    assert torch.equal(page[2 * 128 : 3 * 128], codes.view(torch.uint8)[0])
    assert page[4 * 128 + 2 * 4 : 4 * 128 + 3 * 4].view(torch.float32).tolist() == [2.0 ** (int(scales) - 127)]
    assert (pages == 255).sum() >= pages.numel() - 132


def test_an_mxfp4_index_key_has_the_even_element_in_the_low_half():
    cache, pages = make_cache("mxfp4")
    x = torch.tensor([[0.5, -6.0, *[1.0, 2.0] * 63]])
    insert_entries(cache, torch.tensor([0 * 4 + 1]), x, "mxfp4", 64)
    page = pages[0]
    assert page[64:66].tolist() == [0x1 | 0xF << 4, 0x2 | 0x4 << 4]
    # the largest values of the four groups are 6 and 2: scales 1 and 2^ceil(log2(2 / 6)) = 1/2
    assert page[4 * 64 + 4 : 4 * 64 + 8].tolist() == [127, 126, 126, 126]
    assert page[80:82].tolist() == [0x4 | 0x6 << 4] * 2


@pytest.mark.parametrize(
    ("cache_format", "width", "rope_dims"),
    [("fp8_ds_mla", 12, 8), ("fp8_ds_mla", 8, 8), ("fp8", 14, 8), ("mxfp4", 14, 8)],
)
def test_small_sizes_keep_to_the_same_rule(cache_format, width, rope_dims):
    data, scales = pack(torch.randn(5, width), cache_format, rope_dims)
    assert (data.shape[1], scales.shape[1]) == row_parts(cache_format, width, rope_dims)
    assert scales.shape[1] % 4 == 0
    assert unpack(data, scales, cache_format, rope_dims).shape == (5, width)


@FORMATS
def test_what_is_gathered_is_the_fake_quant_formula_bit_for_bit(cache_format):
    width, rope_dims = RELEASED[cache_format]
    cache, _ = make_cache(cache_format, blocks=5, rows=7)
    x = torch.randn(35, width) * 2.0 ** torch.randint(-30, 30, (35, 1))
    slots = torch.randperm(35)
    insert_entries(cache, slots, x, cache_format, rope_dims)
    given = gather_entries(cache, slots, width, cache_format, rope_dims)
    expected = round_kv(x, cache_format, rope_dims) if cache_format == "fp8_ds_mla" else round_index(x, cache_format)
    assert torch.equal(given.float(), expected)
    assert given.dtype is (torch.bfloat16 if cache_format == "fp8_ds_mla" else torch.float32)


@FORMATS
@pytest.mark.parametrize("live", [[], [0], [11], [5, 0, 11]])
def test_skipped_rows_touch_no_byte(cache_format, live):
    width, rope_dims = RELEASED[cache_format]
    generator = torch.Generator().manual_seed(len(live))
    cache, pages = make_cache(cache_format)
    pages.random_(256, generator=generator)
    expected, _ = make_cache(cache_format)
    before = pages.clone()
    slots = torch.tensor([-1, -1, *live, -1, -1])
    x = torch.full((len(slots), width), float("nan"))
    x[2 : 2 + len(live)] = torch.randn(len(live), width, generator=generator)
    insert_entries(cache, slots, x, cache_format, rope_dims)
    data, scales = row_parts(cache_format, width, rope_dims)
    touched = torch.zeros_like(pages, dtype=torch.bool)
    for slot in live:
        block, row = divmod(slot, 4)
        touched[block, row * data : (row + 1) * data] = True
        touched[block, 4 * data + row * scales : 4 * data + (row + 1) * scales] = True
    assert torch.equal(pages[~touched], before[~touched])
    again = gather_entries(cache, torch.tensor(live, dtype=torch.int64), width, cache_format, rope_dims)
    insert_entries(expected, torch.tensor(live, dtype=torch.int64), x[2 : 2 + len(live)], cache_format, rope_dims)
    kept = gather_entries(expected, torch.tensor(live, dtype=torch.int64), width, cache_format, rope_dims)
    assert torch.equal(again, kept)


@FORMATS
def test_a_skipped_slot_is_zero_whatever_the_pages_hold(cache_format):
    width, rope_dims = RELEASED[cache_format]
    cache, _ = make_cache(cache_format)  # every byte 255: NaN in every format that has one
    given = gather_entries(cache, torch.tensor([[-1, 3], [0, -1]]), width, cache_format, rope_dims)
    assert (given[0, 0] == 0).all()
    assert (given[1, 1] == 0).all()
    assert given[0, 1].isnan().all()


def test_rows_that_do_not_lie_one_after_another_are_refused():
    cache = torch.zeros(3, 584, 4, dtype=torch.uint8).transpose(1, 2)
    reason = why_not_laid_out(cache, "fp8_ds_mla", 512, 64)
    assert reason == "strided (2336, 1, 4); a page of 'fp8_ds_mla' must be 584 bytes a row, row after row"


MISTAKES = {
    "no such format": (
        *("forward_mqa", "c4", {"kv_cache_dtype": "fp8"}, ArgumentError),
        "forward_mqa: unknown kv_cache_dtype 'fp8': did you mean 'fp8_ds_mla'? It takes 'auto', 'fp8_ds_mla'",
    ),
    "a format of the other cache": (
        *("sparse_indexer", "scored", {"index_cache_dtype": "fp8_ds_mla"}, ArgumentError),
        "sparse_indexer: unknown index_cache_dtype 'fp8_ds_mla'. It takes 'auto', 'fp8', 'mxfp4'",
    ),
    "plain rows as pages": (
        *("qnorm_rope_kv_insert", "main", {"kv_cache_dtype": "fp8_ds_mla"}, CacheBindingError),
        "qnorm_rope_kv_insert: swa_cache is torch.float32 [13, 64, 20]; 'fp8_ds_mla' entries of 20 values take "
        "[num_blocks, rows, 36] bytes of torch.uint8",
    ),
    "pages as plain rows": (
        *("forward_mqa", "c4 fp8_ds_mla", {"kv_cache_dtype": "auto"}, CacheBindingError),
        "forward_mqa: swa_cache is torch.uint8 [13, 64, 36]; 'auto' entries of 20 values take [num_blocks, rows, 20] "
        "elements of a floating dtype of 2 bytes or more",
    ),
    "one of two caches": (
        *("forward_mqa", "c4", {"kv_cache": torch.zeros(5, 64, 19)}, CacheBindingError),
        "forward_mqa: kv_cache is torch.float32 [5, 64, 19]; 'auto' entries of 20 values take",
    ),
    "other dims with RoPE": (
        *("forward_mqa", "swa fp8_ds_mla", {"rope_dims": 64}, CacheBindingError),
        "forward_mqa: swa_cache is torch.uint8 [13, 64, 36]; 'fp8_ds_mla' entries of 20 values take",
    ),
    "pages of another format": (
        *("compress_kv_insert", "index_c4 fp8", {"kv_cache_dtype": "mxfp4"}, CacheBindingError),
        "compress_kv_insert: kv_cache is torch.uint8 [7, 64, 18]; 'mxfp4' entries of 14 values take "
        "[num_blocks, rows, 11] bytes of torch.uint8",
    ),
    "8 bits without a scale": (
        *(
            "sparse_indexer",
            "scored",
            {"k_cache": torch.zeros(5, 64, 14, dtype=torch.float8_e4m3fn)},
            CacheBindingError,
        ),
        "sparse_indexer: k_cache is torch.float8_e4m3fn [5, 64, 14]; 'auto' entries of 14 values take",
    ),
    "queries of another format": (
        *("indexer_q_rope", "main fp8", {"index_cache_dtype": "auto"}, ArgumentError),
        "indexer_q_rope: q_out is torch.float8_e4m3fn with no scales; index_cache_dtype 'auto' takes torch.float32 or",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_cache_of_another_format_is_refused_by_name(mistake):
    name, variant, changes, error, message = MISTAKES[mistake]
    with pytest.raises(error) as raised:
        getattr(torch.ops.dsv4, name)(**sample(name, variant) | changes)
    assert str(raised.value).startswith(message)


def test_a_folded_scale_leaves_the_score_as_it_was():
    # relu(q . k) * w = relu((q / s) . k) * (w * s): exact, since s is a power of two
    a = sample("indexer_q_rope", "main fp8", seed=1)
    torch.ops.dsv4.indexer_q_rope(**a)
    plain = sample("indexer_q_rope", "main", seed=1)
    torch.ops.dsv4.indexer_q_rope(**plain)
    queries = round_index(plain["q_out"], "fp8")
    products = a["q_out"].float() * a["weights_out"].unsqueeze(-1)
    assert torch.equal(products, queries * plain["weights_out"].unsqueeze(-1))


def test_mxfp4_queries_carry_their_scales_beside_them():
    a = sample("indexer_q_rope", "main mxfp4", seed=1)
    torch.ops.dsv4.indexer_q_rope(**a)
    plain = sample("indexer_q_rope", "main", seed=1)
    torch.ops.dsv4.indexer_q_rope(**plain)
    assert torch.equal(a["q_out"], quantise_e2m1(plain["q_out"], 32)[0])
    assert torch.equal(unpack(a["q_out"], a["q_scale_out"], "mxfp4"), round_index(plain["q_out"], "mxfp4"))
    assert torch.equal(a["weights_out"], plain["weights_out"])


@FORMATS
def test_no_rows_at_all(cache_format):
    width, rope_dims = RELEASED[cache_format]
    cache, pages = make_cache(cache_format)
    for strides in ((width, 1), (1, 1), (0, 0)):
        none = torch.empty_strided((0, width), strides)
        insert_entries(cache, torch.zeros(0, dtype=torch.int64), none, cache_format, rope_dims)
        data, scales = pack(none, cache_format, rope_dims)
        assert unpack(data, scales, cache_format, rope_dims).shape == (0, width)
    assert (pages == 255).all()
    nowhere = torch.zeros(0, 3, dtype=torch.int64)
    assert gather_entries(cache, nowhere, width, cache_format, rope_dims).shape == (0, 3, width)
