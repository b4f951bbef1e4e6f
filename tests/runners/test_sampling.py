"""Drawn tokens are distributed as the model says, with drafts and without, and depend on seed and logits alone."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from drafting import DraftingStack, drafting_config
from paging import tiny_config
from runner_helpers import RUNNERS, make_prompts, make_runner
from torch import Tensor

from dsv4_compile.errors import InvalidRequestError
from dsv4_compile.models.deepseek_v4 import AttentionStack
from dsv4_compile.runners import ModelRunner, ModelRunnerV2, Sampling
from dsv4_compile.runners.sampling import Choice, Drafts, Purpose, choose, draft_tokens

VOCAB, LENGTH = 5, 3
WORDS = list(itertools.product(range(VOCAB), repeat=LENGTH))


def chain(seed: int) -> Tensor:
    """Logits of the next token by the one before it."""
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


MODEL = chain(0)
DRAFTERS = {"another": chain(1), "the same": MODEL, "the opposite": -3 * MODEL, "the likeliest": 40 * MODEL}


def run_chain(num_requests: int, temperature: float, drafter: Tensor | None, count: int) -> Counter[tuple[int, ...]]:
    """How often each answer came, over as many seeds."""

    def drafts(ids: Tensor, positions: Tensor, step: object, streams: Tensor) -> tuple[Tensor, Tensor]:
        assert drafter is not None
        return drafter[ids.clamp(max=VOCAB - 1)], streams

    def model(ids: Tensor, positions: Tensor, step: object) -> tuple[Tensor, Tensor]:
        return MODEL[ids], torch.zeros(len(ids), 1, 1)

    runner = ModelRunnerV2(
        model,
        config := tiny_config(),
        max_num_reqs=64,
        max_num_batched_tokens=256,
        max_model_len=16,
        attention=AttentionStack(config),
        drafter=None if drafter is None else drafts,
        num_draft_tokens=0 if drafter is None else count,
    )
    for seed in range(num_requests):
        runner.add_request([0], LENGTH, sampling=Sampling(temperature=temperature, seed=seed))
    seen: Counter[tuple[int, ...]] = Counter()
    while runner.num_active:
        seen.update(tuple(answer) for answer in runner.step().finished.values())
    return seen


def chi_square(seen: Counter[tuple[int, ...]], temperature: float) -> tuple[float, float]:
    """The statistic against the chain, rare answers taken together, and its bound at a level of 0.999."""
    shares = torch.softmax(MODEL.double() / temperature, dim=1)
    total = sum(seen.values())
    expected = {}
    for word in WORDS:
        likely = math.prod(shares[a, b].item() for a, b in zip((0, *word), word, strict=False))
        expected[word] = total * likely
    often = [word for word in WORDS if expected[word] >= 5]
    rest = total - sum(expected[word] for word in often), total - sum(seen[word] for word in often)
    cells = [(expected[word], seen[word]) for word in often] + ([rest] if rest[0] >= 5 else [])
    degrees = len(cells) - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    return sum((got - want) ** 2 / want for want, got in cells), bound


@pytest.mark.sampled(13)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("count", [2, 1])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_do_not_change_the_distribution(drafter: str, count: int, temperature: float) -> None:
    statistic, bound = chi_square(run_chain(1500, temperature, DRAFTERS[drafter], count), temperature)
    assert statistic < bound


def test_without_drafts_it_is_the_models_own() -> None:
    statistic, bound = chi_square(run_chain(1500, 1.0, None, 0), 1.0)
    assert statistic < bound


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_distribution_over_many_seeds(drafter: str) -> None:
    statistic, bound = chi_square(run_chain(20000, 1.0, DRAFTERS[drafter], 2), 1.0)
    assert statistic < bound


def always_accept(self: Sampling, position: int, purpose: Purpose) -> float:
    return 0.0 if purpose == "accept" else uniform(self, position, purpose)


def never_accept(self: Sampling, position: int, purpose: Purpose) -> float:
    return 2.0 if purpose == "accept" else uniform(self, position, purpose)


def one_number_for_all(self: Sampling, position: int, purpose: Purpose) -> float:
    return uniform(self, position, "token")


uniform = Sampling.uniform


@pytest.mark.parametrize(
    ("wrong", "drafter"),
    [(always_accept, "another"), (never_accept, "another"), (one_number_for_all, "the likeliest")],
)
def test_a_wrong_rule_is_noticed(wrong: Callable[..., float], drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampling, "uniform", wrong)
    statistic, bound = chi_square(run_chain(1500, 1.0, DRAFTERS[drafter], 2), 1.0)
    assert statistic > 2 * bound


def test_drafts_of_the_same_distribution_always_stay() -> None:
    choices = [Choice(Sampling(seed=seed), 10, row) for seed, row in enumerate([0, 1, 2, 3, 4])]
    drafts = draft_tokens(MODEL, choices)
    logits = MODEL.repeat_interleave(2, dim=0)
    kept = [Choice(c.sampling, 10, 2 * c.row, given) for c, given in zip(choices, drafts, strict=True)]
    assert [tokens[0] for tokens in choose(logits, kept)] == [given.tokens[0] for given in drafts]


def test_greedy_and_drawn_requests_in_one_batch() -> None:
    best = MODEL.argmax(1).tolist()
    wrong = Drafts(((best[1] + 1) % VOCAB,))
    choices = [
        Choice(None, 4, 0, Drafts((best[0], best[1]))),
        Choice(Sampling(seed=1), 4, 3),
        Choice(None, 4, 1, wrong),
        Choice(None, 9, 4),
    ]
    verdicts = choose(MODEL, choices)
    assert verdicts[0] == [best[0], best[1], best[2]]
    assert verdicts[1] == choose(MODEL, choices[1:2])[0]
    assert verdicts[2:] == [[best[1]], [best[4]]]


def test_a_token_without_a_share_is_never_drawn() -> None:
    logits = torch.full((1, 7), -torch.inf)
    logits[0, [2, 5]] = torch.tensor([0.0, -1.0])
    drawn = {choose(logits, [Choice(Sampling(seed=seed), 0, 0)])[0][0] for seed in range(300)}
    assert drawn == {2, 5}
    almost_one = type("Almost", (), {"temperature": 1.0, "uniform": lambda *_: 1 - 2**-53})()
    assert choose(logits, [Choice(almost_one, 0, 0)]) == [[5]]  # type: ignore[arg-type]


# what an answer depends on


@pytest.fixture(scope="module")
def stack() -> DraftingStack:
    return DraftingStack(drafting_config())


def answers_of(runner: ModelRunner, order: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Answers of five prompts, whose requests join in some order, one a step."""
    prompts = make_prompts(60, 3, 1, 29, 5)
    waiting, ids, answers = list(order), {}, {}
    while waiting or runner.num_active:
        if waiting:
            index = waiting.pop(0)
            sampling = Sampling(temperature=0.7, seed=seed + index)
            ids[index] = runner.add_request(prompts[index], 12, sampling=sampling)
        answers.update(runner.step().finished)
    return [answers[ids[index]] for index in sorted(ids)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("runner_type", RUNNERS)
def test_an_answer_depends_on_its_seed_and_not_on_what_else_runs(
    stack: DraftingStack, runner_type: type[ModelRunner], count: int
) -> None:
    drafting = {"drafter": stack.drafter, "num_draft_tokens": count} if count else {}
    expected = answers_of(make_runner(stack, runner_type, **drafting), range(5))
    order = random.Random(0).sample(range(5), 5)
    for options in ({"max_num_reqs": 2}, {"buckets": (6, 48)}):
        assert answers_of(make_runner(stack, runner_type, **drafting, **options), order) == expected
    assert answers_of(make_runner(stack, runner_type, **drafting), range(5), seed=100) != expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, r"temperature is 0.0; it must be a finite number above 0 \(sampling=None is greedy\)"),
        ({"temperature": -1}, "temperature is -1; "),
        ({"temperature": float("nan")}, "temperature is nan; "),
        ({"temperature": float("inf")}, "temperature is inf; "),
        ({"temperature": True}, "temperature is True; "),
        ({"temperature": "warm"}, "temperature is 'warm'; "),
        ({"seed": 1.0}, "seed is 1.0; it must be an int of at most 64 bits"),
        ({"seed": None}, "seed is None; "),
        ({"seed": 1 << 63}, "seed is 9223372036854775808; "),
    ],
)
def test_what_cannot_be_drawn_with_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Sampling(**values)  # type: ignore[arg-type]
