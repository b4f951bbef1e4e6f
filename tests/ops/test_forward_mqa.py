"""The attention core against the naive reference: window, selected and completed entries, sink, padding."""

import op_samples
import pytest
import reference
import torch

from dsv4_compile.ops import forward_mqa

VARIANTS = pytest.mark.parametrize("variant", ["swa", "c4", "c128"])


def visible_keys(a, t):
    """The keys of a token, gathered one by one."""
    position, request, ratio = int(a["positions"][t]), int(a["token_to_req"][t]), a["ratio"]

    def row(cache, table, index):
        size = cache.shape[1]
        return cache[int(table[request, index // size]), index % size].double()

    keys = [
        row(a["swa_cache"], a["swa_block_table"], p) for p in range(max(0, position - a["window"] + 1), position + 1)
    ]
    if a["topk_indices"] is not None:
        keys += [row(a["kv_cache"], a["block_table"], b) for b in a["topk_indices"][t].tolist() if b >= 0]
    elif ratio:
        keys += [row(a["kv_cache"], a["block_table"], b) for b in range((position + 1) // ratio)]
    return torch.stack(keys)


def expected(a):
    sink = a["attn_sink"].double()
    tokens = range(a["q"].shape[0])
    outputs = [reference.sink_attention(a["q"][t].double(), visible_keys(a, t), sink, a["scale"]) for t in tokens]
    return torch.stack(outputs)


def run(a):
    torch.ops.dsv4.forward_mqa(**a)
    return a["out"]


def check(actual, wanted, tolerance=2e-6):
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance)


@VARIANTS
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_reference(variant, seed):
    a = op_samples.sample("forward_mqa", variant, seed=seed)
    check(run(a), expected(a))


@VARIANTS
def test_bf16_is_rounded_once_at_the_end(variant):
    a = op_samples.sample("forward_mqa", variant, dtype=torch.bfloat16)
    wanted = expected(a)
    torch.testing.assert_close(run(a).double(), wanted, rtol=2**-8, atol=1e-5)


@VARIANTS
def test_data_that_no_valid_index_names_does_not_leak(variant):
    a = op_samples.sample("forward_mqa", variant)
    wanted = expected(a)
    for name in ("swa_cache", "kv_cache"):
        if a[name] is not None:
            a[name] = torch.where(_named_rows(a, name), a[name], float("nan"))
    check(run(a), wanted)


def _named_rows(a, name):
    """bool [num_blocks, block_size, 1]: rows of a cache that some token of the step may read."""
    probe = a | {key: torch.zeros_like(a[key]) for key in ("swa_cache", "kv_cache") if a[key] is not None}
    ids = torch.arange(a[name].shape[0] * a[name].shape[1], dtype=torch.float32)
    probe[name] = ids.view(*a[name].shape[:2], 1).expand_as(a[name]).clone() + 1
    named = torch.cat([visible_keys(probe, t)[:, 0] for t in range(a["q"].shape[0])])
    return torch.isin(ids + 1, named.float()).view(*a[name].shape[:2], 1)


@VARIANTS
def test_padded_rows_become_zero(variant):
    a = op_samples.pad("forward_mqa", op_samples.sample("forward_mqa", variant), 4)
    # a head without a sink: nothing at all is left to attend to
    a["attn_sink"][0] = float("-inf")
    out = run(a)
    assert (out[-4:] == 0).all()
    assert out[:-4].abs().min() > 0


@VARIANTS
def test_a_step_of_padding_alone_is_zero(variant):
    a = op_samples.sample("forward_mqa", variant)
    a["token_to_req"] = torch.full_like(a["token_to_req"], -1)
    assert (run(a) == 0).all()


@VARIANTS
def test_attending_in_parts_changes_nothing(variant, monkeypatch):
    a = op_samples.sample("forward_mqa", variant)
    whole = run(a).clone()
    monkeypatch.setattr(forward_mqa, "_GATHER_BUDGET", 1000)
    a["out"].fill_(7)
    torch.testing.assert_close(run(a), whole, rtol=0, atol=1e-6)


def test_blocks_that_are_not_allocated_are_skipped():
    a = op_samples.sample("forward_mqa", "c128")
    # token 3 of request 1 is at position 256: the first of a window block, the rest of its window is in another one
    assert a["positions"][3] == 256
    a["swa_block_table"][1, 3] = -1
    a["block_table"][1, 0] = -1
    key = a["swa_cache"][int(a["swa_block_table"][1, 4]), :1].double()
    check(run(a)[3], reference.sink_attention(a["q"][3].double(), key, a["attn_sink"].double(), a["scale"]))


def test_indices_may_skip_in_any_place():
    a = op_samples.sample("forward_mqa", "c4")
    rows = a["topk_indices"][: op_samples.NUM_TOKENS]
    holes = ((rows[:, :-1] == -1) & (rows[:, 1:] >= 0)).any()
    assert holes
    check(run(a), expected(a))


def test_a_large_sink_takes_all_attention():
    a = op_samples.sample("forward_mqa", "swa") | {"attn_sink": torch.full((6,), 1e4)}
    assert (run(a) == 0).all()


def test_a_sink_of_minus_infinity_takes_none():
    a = op_samples.sample("forward_mqa", "swa") | {"attn_sink": torch.full((6,), float("-inf"))}
    keys = visible_keys(a, 0)
    weights = torch.softmax(a["q"][0].double() @ keys.T * a["scale"], dim=-1)
    check(run(a)[0], weights @ keys)


def test_the_first_token_attends_to_itself_alone():
    a = op_samples.sample("forward_mqa", "c128")
    a["attn_sink"].fill_(float("-inf"))
    first = op_samples.SPANS[0][2]
    assert a["positions"][first] == 0
    check(run(a)[first], visible_keys(a, first).expand(6, -1))
