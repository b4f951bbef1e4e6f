"""Exact ties at the top-k boundary: the lower block id wins, whatever else is in the step.

Queries, keys and weights are small integers, so scores are exact and tie often, most of them at 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import op_samples
import pytest
import reference
import torch
from paging import Paging
from torch import Tensor

from dsv4_compile.ops import sparse_indexer

TOPK = 7
# up to 75 completed blocks in two blocks of the cache, and requests so short that all is selected
LENGTHS = (300, 40, 9, 200)
RATIO = 4


class Requests:
    """Indexer inputs of every position of several requests; each step of the op takes rows of them."""

    def __init__(self, heads: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.paging = Paging(op_samples.CONFIG, LENGTHS, seed=seed)
        g = torch.Generator().manual_seed(seed)
        rows = op_samples.CONFIG.compressed_block_size // RATIO
        self.k_cache = torch.randint(-1, 2, (self.paging.num_blocks["compressed"], rows, 4), generator=g).to(dtype)
        self.q = [torch.randint(-1, 2, (length, heads, 4), generator=g).to(dtype) for length in LENGTHS]
        self.weights = [torch.randint(-2, 3, (length, heads), generator=g).float() for length in LENGTHS]

    def select(self, spans: Sequence[tuple[int, int, int]], padding: int = 0, topk: int = TOPK) -> Tensor:
        """What a step of (request, start, count) spans selects, padded rows left out."""
        positions, step = self.paging.step(spans, padding=padding)
        chosen = torch.full((len(positions) + 3, topk), 77, dtype=torch.int32)
        torch.ops.dsv4.sparse_indexer(
            self._rows(self.q, spans, padding),
            None,
            self._rows(self.weights, spans, padding),
            positions,
            self.k_cache,
            step.token_to_req,
            step.block_table,
            RATIO,
            chosen,
        )
        live = len(positions) - padding
        assert (chosen[live:-3] == -1).all()
        assert (chosen[-3:] == 77).all()
        return chosen[:live]

    def _rows(self, values: list[Tensor], spans: Sequence[tuple[int, int, int]], padding: int) -> Tensor:
        rows = [values[request][start : start + count] for request, start, count in spans]
        return torch.cat([*rows, torch.full((padding, *values[0].shape[1:]), float("nan"), dtype=values[0].dtype)])

    def scores(self, request: int, position: int) -> Tensor:
        """Of the completed blocks, by the formula: float64."""
        slots = [self.paging.slot("compressed", request, b * RATIO, RATIO) for b in range((position + 1) // RATIO)]
        keys = self.k_cache.flatten(0, 1)[slots].double()
        q, weights = self.q[request][position].double(), self.weights[request][position].double()
        return weights @ (q @ keys.T).clamp(min=0)

    def expected(self, request: int, position: int, topk: int = TOPK) -> list[int]:
        """A stable sort by score: of equals the lower id comes first."""
        found = sorted(reference.best(self.scores(request, position), topk))
        return found + [-1] * (topk - len(found))


def is_tied(scores: Tensor, topk: int = TOPK) -> bool:
    """Whether the last one that is selected and the first one that is not have the same score."""
    ranked = scores.sort(descending=True).values
    return len(scores) > topk and ranked[topk - 1].item() == ranked[topk].item()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_of_equal_scores_the_lower_id_is_selected(heads: int, seed: int, dtype: torch.dtype) -> None:
    requests = Requests(heads, seed, dtype)
    for request, length in enumerate(LENGTHS):
        rows = requests.select([(request, 0, length)]).tolist()
        assert rows == [requests.expected(request, position) for position in range(length)]
    assert sum(is_tied(requests.scores(0, position)) for position in range(LENGTHS[0])) > 50


@pytest.mark.parametrize("topk", [1, 7, 64])
@pytest.mark.parametrize("zero", ["weights", "queries", "relu"])
def test_where_every_score_is_zero_the_first_blocks_are_selected(zero: str, topk: int) -> None:
    requests = Requests(heads=3)
    if zero == "weights":
        requests.weights = [torch.zeros_like(weights) for weights in requests.weights]
    elif zero == "queries":
        requests.q = [torch.zeros_like(q) for q in requests.q]
    else:  # no product is positive
        requests.k_cache.abs_()
        requests.q = [-q.abs() for q in requests.q]
    rows = requests.select([(0, 0, 300)], topk=topk).tolist()
    for position, row in enumerate(rows):
        count = min((position + 1) // RATIO, topk)
        assert row == [*range(count), *[-1] * (topk - count)]


def test_zeros_of_both_signs_are_equal() -> None:
    requests = Requests(heads=1)
    requests.q = [torch.zeros_like(q) for q in requests.q]
    # the product of a weight below 0 and a ReLU of 0 is -0.0: one sign for each key is not possible with one head, so
    # blocks score -0.0 in one token and 0.0 in the next
    requests.weights = [(-1.0) ** torch.arange(len(w)).unsqueeze(1) for w in requests.weights]
    rows = requests.select([(0, 100, 200)]).tolist()
    assert rows == [list(range(TOPK))] * 200
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 0.0, -1.0, 1.0]])
    visible = torch.ones_like(scores, dtype=torch.bool)
    assert sparse_indexer._select_best(scores, visible, 4).tolist() == [[0, 1, 2, 6]]


def random_steps(seed: int) -> list[tuple[list[tuple[int, int, int]], int]]:
    """Every position of every request once, in steps of a random mix of spans, with random padding."""
    rng = random.Random(seed)
    done, steps = [0] * len(LENGTHS), []
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        spans = []
        for request in rng.sample(range(len(LENGTHS)), rng.randint(1, len(LENGTHS))):
            count = min(rng.choice([1, 2, 3, 17, 64]), LENGTHS[request] - done[request])
            if count:
                spans.append((request, done[request], count))
                done[request] += count
        if spans:
            steps.append((spans, rng.choice([0, 0, 1, 5])))
    return steps


def selected_in(requests: Requests, steps: Sequence[tuple[list[tuple[int, int, int]], int]]) -> dict[Any, list[int]]:
    found = {}
    for spans, padding in steps:
        tokens = [(request, p) for request, start, count in spans for p in range(start, start + count)]
        rows = requests.select(spans, padding).tolist()
        found.update(zip(tokens, rows, strict=True))
    return found


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_row_does_not_depend_on_the_step_it_is_in(heads: int, seed: int) -> None:
    requests = Requests(heads, seed)
    whole = [([(request, 0, length) for request, length in enumerate(LENGTHS)], 0)]
    single = [([(request, p, 1)], 0) for request, length in enumerate(LENGTHS) for p in range(length)]
    expected = selected_in(requests, whole)
    assert len(expected) == sum(LENGTHS)
    for steps in (single, random_steps(seed), random_steps(seed + 100)):
        assert selected_in(requests, steps) == expected


@pytest.mark.parametrize("budget", [1, 2 * 75, 5 * 2 * 75 + 1, 64 * 2 * 75])
def test_scoring_in_parts_breaks_no_tie_differently(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    requests = Requests(heads=2)
    expected = requests.select([(0, 0, 300), (3, 50, 100)])
    monkeypatch.setattr(sparse_indexer, "_SCORE_BUDGET", budget)
    assert torch.equal(requests.select([(0, 0, 300), (3, 50, 100)]), expected)


def test_a_tie_across_two_blocks_of_the_cache() -> None:
    # ids 0..63 are in the first block of the request, 64..74 in the second; only the last of the first and all of the
    # second score above 0, and these tie
    requests = Requests(heads=1)
    requests.q[0].fill_(1)
    requests.weights[0].fill_(1)
    requests.k_cache.fill_(-1)
    for b in range(60, 75):
        slot = requests.paging.slot("compressed", 0, b * RATIO, RATIO)
        requests.k_cache.flatten(0, 1)[slot] = 1
    assert requests.select([(0, 299, 1)]).tolist() == [[60, 61, 62, 63, 64, 65, 66]]
    assert requests.select([(0, 255, 1)]).tolist() == [[0, 1, 2, 60, 61, 62, 63]]
    assert requests.select([(0, 263, 1)], topk=10).tolist() == [[0, 1, 2, 3, 60, 61, 62, 63, 64, 65]]


@pytest.mark.parametrize("budget", [1, 1 << 26])
def test_rows_ascend_whether_or_not_they_are_scored(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(sparse_indexer, "_SCORE_BUDGET", budget)
    requests = Requests(heads=4)
    alone = requests.select([(1, 0, 28)])  # 7 blocks at most: nothing is scored
    beside = requests.select([(1, 0, 28), (0, 299, 1)])
    assert torch.equal(alone, beside[:28])
    assert alone[-1].tolist() == list(range(TOPK))


def test_scores_that_are_no_numbers_select_as_many() -> None:
    requests = Requests(heads=2)
    requests.weights[0][290:] = float("nan")
    rows = requests.select([(0, 280, 20)])
    assert (rows >= 0).all()
    assert rows[:10].tolist() == [requests.expected(0, position) for position in range(280, 290)]
