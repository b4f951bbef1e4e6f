"""The selection: the top-k completed blocks by naive scores, everything when they are few, nothing for padding."""

import op_samples
import pytest
import reference
import torch

from dsv4_compile.errors import ArgumentError, RunnerError
from dsv4_compile.ops import sparse_indexer
from dsv4_compile.ops._paging import locate

TOKENS = op_samples.NUM_TOKENS


def expected_sets(a):
    """Per token: the best completed blocks by the reference's scores."""
    count = a["topk_indices"].shape[1]
    keys = a["k_cache"].double().flatten(0, 1)
    rows = a["k_cache"].shape[1]
    found = []
    for t, (position, request) in enumerate(zip(a["positions"].tolist(), a["token_to_req"].tolist(), strict=True)):
        completed = (position + 1) // a["ratio"]
        if request < 0 or completed == 0:
            found.append(set())
            continue
        slots = [int(a["block_table"][request, b // rows]) * rows + b % rows for b in range(completed)]
        scores = reference.index_scores(a["index_q"][t].double(), a["index_weights"][t].double(), keys[slots])
        found.append(set(reference.best(scores, count)))
    return found


def selected_sets(a, tokens=TOKENS):
    """Per token, after checking that -1 comes last and no block is named twice."""
    rows = a["topk_indices"][:tokens].tolist()
    for row in rows:
        named = [b for b in row if b >= 0]
        assert row == named + [-1] * (len(row) - len(named))
        assert len(set(named)) == len(named)
    return [{b for b in row if b >= 0} for row in rows]


def run(a):
    torch.ops.dsv4.sparse_indexer(**a)
    return a


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selects_the_best_completed_blocks(dtype, seed):
    a = run(op_samples.sample("sparse_indexer", "scored", dtype=dtype, seed=seed))
    assert selected_sets(a) == expected_sets(a)


def test_selects_everything_where_it_fits_without_scoring():
    a = op_samples.sample("sparse_indexer", "everything")
    # nothing may be read: scores of these would be NaN
    a["k_cache"].fill_(float("nan"))
    run(a)
    completed = [(p + 1) // 4 for p in a["positions"].tolist()]
    assert selected_sets(a) == [set(range(n)) for n in completed]


def test_the_shortcut_ends_exactly_where_blocks_exceed_k():
    # the longest token has 64 completed blocks: 64 are all of them, with 63 one is left out
    for count, scored in ((64, False), (63, True)):
        a = op_samples.sample("sparse_indexer", "scored")
        a["positions"] = a["positions"].clamp(max=255)
        a["topk_indices"] = torch.full((TOKENS, count), 77, dtype=torch.int32)
        run(a)
        assert selected_sets(a) == expected_sets(a)
        assert (max(map(len, selected_sets(a))) < 64) == scored


@pytest.mark.parametrize("variant", ["scored", "everything"])
def test_blocks_that_are_not_allocated_are_not_selected(variant):
    a = op_samples.sample("sparse_indexer", variant)
    # request 1 loses its only full block; what is left are the three entries of the next one
    a["positions"][:6] += 16
    a["block_table"][1, 0] = -1
    run(a)
    rows = a["k_cache"].shape[1]
    for t in range(6):
        left = {b for b in range((int(a["positions"][t]) + 1) // 4) if b >= rows}
        assert left
        assert {b for b in a["topk_indices"][t].tolist() if b >= 0} == left


def test_rows_beyond_the_step_keep_their_contents():
    a = run(op_samples.sample("sparse_indexer", "scored"))
    assert (a["topk_indices"][TOKENS:] == 77).all()


@pytest.mark.parametrize("variant", ["scored", "everything"])
def test_padded_tokens_select_nothing(variant):
    a = run(op_samples.pad("sparse_indexer", op_samples.sample("sparse_indexer", variant), 3))
    assert (a["topk_indices"][TOKENS : TOKENS + 3] == -1).all()
    assert selected_sets(a) == expected_sets(a)[:TOKENS]


def test_keys_that_no_block_names_do_not_count():
    a = op_samples.sample("sparse_indexer", "scored")
    expected = expected_sets(a)
    rows = a["k_cache"].shape[1]
    named = set()
    for request, position in zip(a["token_to_req"].tolist(), a["positions"].tolist(), strict=True):
        ids = torch.arange((position + 1) // 4)
        named |= set(locate(a["block_table"], torch.full_like(ids, request), ids, rows).tolist())
    others = [slot for slot in range(a["k_cache"].shape[0] * rows) if slot not in named]
    a["k_cache"].view(-1, a["k_cache"].shape[2])[others] = float("nan")
    assert selected_sets(run(a)) == expected


def test_scoring_in_parts_changes_nothing(monkeypatch):
    whole = run(op_samples.sample("sparse_indexer", "scored"))
    monkeypatch.setattr(sparse_indexer, "_SCORE_BUDGET", 2 * 64 * 64)
    parts = run(op_samples.sample("sparse_indexer", "scored"))
    assert selected_sets(parts) == selected_sets(whole)


def test_more_tokens_than_rows_is_an_error():
    a = op_samples.sample("sparse_indexer", "scored")
    a["topk_indices"] = a["topk_indices"][:10]
    with pytest.raises(RunnerError, match="a step of 14 tokens, but topk_indices has 10 rows; raise max_num_batched"):
        run(a)


@pytest.mark.parametrize(
    ("cache_format", "changes", "message"),
    [
        (
            "auto",
            {"index_q_scale": torch.ones(TOKENS, 64)},
            r"index_q is torch.float32 with scales .* takes .* no scales",
        ),
        (
            "fp8",
            {"index_q": torch.ones(TOKENS, 64, 14)},
            "index_q is torch.float32 with no scales; .* 'fp8' takes torch.fl",
        ),
        ("mxfp4", {"index_q_scale": None}, r"index_q is torch.uint8 with no scales; .* takes torch.uint8 with scales"),
        ("mxfp4", {"index_q_scale": torch.ones(TOKENS, 64, 1).byte()}, r"with scales torch.uint8 \[14, 64, 4\]$"),
    ],
)
def test_queries_of_another_format_than_the_keys_are_an_error(cache_format, changes, message):
    variant = "scored" if cache_format == "auto" else f"scored {cache_format}"
    with pytest.raises(ArgumentError, match=message):
        run(op_samples.sample("sparse_indexer", variant) | changes)
