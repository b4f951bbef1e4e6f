"""The ops that norm and rotate, against the naive reference, and the insert into the sliding-window cache."""

import op_samples
import pytest
import reference
import torch

CONFIG = op_samples.CONFIG


def check(actual, expected, dtype):
    tolerance = 1e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
def test_fused_q_kv_rmsnorm(dtype):
    a = op_samples.sample("fused_q_kv_rmsnorm", dtype=dtype)
    op_samples.op("fused_q_kv_rmsnorm")(**a)
    q_lora = CONFIG.q_lora_rank
    x = a["qr_kv"].double()
    check(a["qr_out"], reference.rms_norm(x[:, :q_lora], a["eps"], a["q_weight"].double()), dtype)
    check(a["kv_out"], reference.rms_norm(x[:, q_lora:], a["eps"], a["kv_weight"].double()), dtype)


def test_the_epsilon_of_the_norm_counts():
    a = op_samples.sample("fused_q_kv_rmsnorm") | {"eps": 0.5}
    op_samples.op("fused_q_kv_rmsnorm")(**a)
    kv = a["qr_kv"][:, CONFIG.q_lora_rank :].double()
    check(a["kv_out"], reference.rms_norm(kv, 0.5, a["kv_weight"].double()), torch.float32)


@DTYPES
def test_qnorm_rope_kv_insert(dtype):
    a = op_samples.sample("qnorm_rope_kv_insert", dtype=dtype)
    cache = a["swa_cache"].clone().flatten(0, 1)
    op_samples.op("qnorm_rope_kv_insert")(**a)
    freqs = reference.frequencies(CONFIG, compressed=False)
    for t, (position, slot) in enumerate(zip(a["positions"].tolist(), a["slot_mapping"].tolist(), strict=True)):
        q = reference.rms_norm(a["q"][t].double(), a["eps"])
        check(a["q_out"][t], reference.rope(q, position, freqs), dtype)
        check(a["swa_cache"].flatten(0, 1)[slot], reference.rope(a["kv"][t].double(), position, freqs), dtype)
        cache[slot] = a["swa_cache"].flatten(0, 1)[slot]
    assert torch.equal(a["swa_cache"].flatten(0, 1), cache)


def test_a_skipped_row_among_live_ones_writes_no_cache_row():
    a = op_samples.sample("qnorm_rope_kv_insert")
    before = a["swa_cache"].clone().flatten(0, 1)
    slots = [0, -1, a["swa_cache"].flatten(0, 1).shape[0] - 1] + [-1] * (op_samples.NUM_TOKENS - 3)
    op_samples.op("qnorm_rope_kv_insert")(**a | {"slot_mapping": torch.tensor(slots)})
    changed = (a["swa_cache"].flatten(0, 1) != before).any(1).nonzero().flatten().tolist()
    assert changed == [0, slots[2]]


@DTYPES
def test_indexer_q_rope(dtype):
    a = op_samples.sample("indexer_q_rope", dtype=dtype)
    op_samples.op("indexer_q_rope")(**a)
    freqs = reference.frequencies(CONFIG, compressed=True)
    for t, position in enumerate(a["positions"].tolist()):
        check(a["q_out"][t], reference.rope(a["index_q"][t].double(), position, freqs), dtype)
    check(a["weights_out"], a["weights"].double() * a["scale"], torch.float32)


@DTYPES
def test_inverse_rope(dtype):
    a = op_samples.sample("inverse_rope", dtype=dtype)
    op_samples.op("inverse_rope")(**a)
    freqs = reference.frequencies(CONFIG, compressed=False)
    for t, position in enumerate(a["positions"].tolist()):
        check(a["out"][t], reference.rope(a["x"][t].double(), position, freqs, inverse=True), dtype)


def test_inverse_rope_undoes_rope():
    a = op_samples.sample("qnorm_rope_kv_insert")
    op_samples.op("qnorm_rope_kv_insert")(**a)
    back = torch.empty_like(a["q_out"])
    torch.ops.dsv4.inverse_rope(a["q_out"], a["positions"], a["cos_sin"], back)
    torch.testing.assert_close(back.double(), reference.rms_norm(a["q"].double(), 1e-6), rtol=0, atol=2e-6)


def test_a_head_may_be_rotated_whole():
    cos_sin = reference.frequencies(CONFIG, compressed=False)
    table = torch.cat([torch.outer(torch.arange(9.0), cos_sin).cos(), torch.outer(torch.arange(9.0), cos_sin).sin()], 1)
    x = torch.randn(2, 3, CONFIG.qk_rope_head_dim)
    out = torch.empty_like(x)
    torch.ops.dsv4.inverse_rope(x, torch.tensor([0, 8]), table, out)
    assert torch.equal(out[0], x[0])
    expected = reference.rope(x[1].double(), 8, reference.frequencies(CONFIG, compressed=False), inverse=True)
    check(out[1], expected, torch.float32)
