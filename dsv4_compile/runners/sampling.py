"""Which token comes next: the likeliest, or one that is drawn; and which of the drafted tokens stay.

A draft is verified against what the model itself would say at its position. Greedily it stays if it is the likeliest
token. With `Sampling` it was drawn from the drafter's distribution q, and stays with probability min(1, p / q) for the
model's p; the token in the place of a rejected one is drawn from max(p - q, 0), normalised. So every token is
distributed as p, whatever q was.

Note "random numbers": a draw is a function of the request's seed, the position of the token, and what it is for; no
generator moves on. So answers depend neither on what else runs nor on preemption, and a step that failed half-way
draws the same numbers when it is repeated. A position may be drafted more than once, but the numbers that decide its
token are looked at once.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import InvalidRequestError

Purpose = Literal["draft", "accept", "token"]
_PURPOSES: tuple[Purpose, ...] = ("draft", "accept", "token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of a request are drawn.

    Attributes:
        temperature: logits are divided by it; above 0.
        seed: the same seed gives the same answer.

    Raises:
        InvalidRequestError: a temperature that is no finite number above 0, or a seed that is no 64-bit int.
    """

    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature, seed = self.temperature, self.seed
        is_number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if not is_number or not 0 < temperature < math.inf:
            raise InvalidRequestError(
                f"temperature is {temperature!r}; it must be a finite number above 0 (sampling=None is greedy)"
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
            raise InvalidRequestError(f"seed is {seed!r}; it must be an int of at most 64 bits")

    def uniform(self, position: int, purpose: Purpose) -> float:
        """A number in [0, 1) for one decision about the token at a position; see the note "random numbers"."""
        key = struct.pack("<qqq", self.seed, position, _PURPOSES.index(purpose))
        (bits,) = struct.unpack("<Q", hashlib.blake2b(key, digest_size=8).digest())
        return float(bits >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that may come next, as the drafter has it.

    Attributes:
        tokens: the first is for the position after the last known token.
        shares: [vocab] float64 for each, the distribution it was drawn from; empty if each is the likeliest.
    """

    tokens: tuple[int, ...] = ()
    shares: tuple[Tensor, ...] = ()

    def first(self, count: int) -> Drafts:
        """The first `count` of them."""
        return Drafts(self.tokens[:count], self.shares[:count])


NO_DRAFTS = Drafts()


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of logits that decide the next tokens of one request.

    Attributes:
        sampling: how; None: the likeliest.
        position: of the token that the first row decides.
        row: the first row; one more follows for each draft.
        drafts: tokens to verify, which the rows up to the last have seen.
    """

    sampling: Sampling | None
    position: int
    row: int
    drafts: Drafts = NO_DRAFTS

    @property
    def rows(self) -> range:
        """One row a draft, and one that decides the token after them."""
        return range(self.row, self.row + len(self.drafts.tokens) + 1)


def choose(logits: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
    """The next tokens of each request: the drafts that stay, then one more token.

    Args:
        logits: [T, vocab].
        choices: which rows decide.

    Returns:
        From 1 to 1 + drafts tokens for each choice, in order.
    """
    greedy = [choice for choice in choices if choice.sampling is None]
    drawn = [choice for choice in choices if choice.sampling is not None]
    verdicts = iter(_verify_greedily(logits, greedy)), iter(_verify_by_draw(logits, drawn))
    return [next(verdicts[choice.sampling is not None]) for choice in choices]


def draft_tokens(logits: Tensor, choices: Sequence[Choice]) -> list[Drafts]:
    """One draft for each choice, out of its first row of the drafter's logits."""
    greedy = [choice for choice in choices if choice.sampling is None]
    drawn = [choice for choice in choices if choice.sampling is not None]
    likeliest = iter(_likeliest(logits, [choice.row for choice in greedy]))
    shares = _shares(logits, drawn)
    sampled = zip(_invert(shares, _numbers(drawn, "draft")).tolist(), shares, strict=True)
    drafts = []
    for choice in choices:
        if choice.sampling is None:
            drafts.append(Drafts((next(likeliest),)))
        else:
            token, share = next(sampled)
            drafts.append(Drafts((token,), (share,)))
    return drafts


def _verify_greedily(logits: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
    best = iter(_likeliest(logits, [row for choice in choices for row in choice.rows]))
    verdicts = []
    for choice in choices:
        tokens = [next(best) for _ in choice.rows]
        verdicts.append(_kept(choice, list(map(int.__eq__, choice.drafts.tokens, tokens)), tokens))
    return verdicts


def _verify_by_draw(logits: Tensor, choices: Sequence[Choice]) -> list[list[int]]:
    """See the module docstring; one row of the matrices here is one row of logits."""
    if not choices:
        return []
    wanted = _shares(logits, choices)
    drafted, offered = _drafted(wanted, choices)
    p, q = (shares.gather(1, drafted.unsqueeze(1)).squeeze(1) for shares in (wanted, offered))
    accept = torch.tensor(_numbers(choices, "accept"), dtype=torch.float64, device=p.device)
    rest = (wanted - offered).clamp(min=0)
    # nothing is left only where p equals q up to rounding, and there a draft stays
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, wanted)
    stays = iter((accept * q < p).tolist())
    instead = iter(_invert(rest, _numbers(choices, "token")).tolist())
    return [
        _kept(choice, [next(stays) for _ in choice.rows], [next(instead) for _ in choice.rows]) for choice in choices
    ]


def _kept(choice: Choice, stays: Sequence[bool], tokens: Sequence[int]) -> list[int]:
    """Drafts up to the first that does not stay, then what comes in its place or after them all."""
    drafts = choice.drafts.tokens
    count = next((index for index in range(len(drafts)) if not stays[index]), len(drafts))
    return [*drafts[:count], tokens[count]]


def _drafted(wanted: Tensor, choices: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """The draft of each row and the distribution it came from; zeros for rows after the last draft, which keep all."""
    offered = torch.zeros_like(wanted)
    tokens: list[int] = []
    for choice in choices:
        for token, share in zip(choice.drafts.tokens, choice.drafts.shares, strict=True):
            offered[len(tokens)] = share
            tokens.append(token)
        tokens.append(0)
    return torch.tensor(tokens, device=wanted.device), offered


def _numbers(choices: Sequence[Choice], purpose: Purpose) -> list[float]:
    return [
        choice.sampling.uniform(choice.position + index, purpose)
        for choice in choices
        if choice.sampling
        for index in range(len(choice.rows))
    ]


def _likeliest(logits: Tensor, rows: Sequence[int]) -> list[int]:
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    tokens: list[int] = logits[index].argmax(dim=-1).tolist()
    return tokens


def _shares(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Distributions, float64 [rows, vocab]."""
    rows = torch.tensor([row for choice in choices for row in choice.rows], dtype=torch.int64, device=logits.device)
    warmth = [choice.sampling.temperature for choice in choices if choice.sampling for _ in choice.rows]
    scale = torch.tensor(warmth, dtype=torch.float64, device=logits.device).unsqueeze(1)
    return torch.softmax(logits[rows].double() / scale, dim=-1)


def _invert(shares: Tensor, numbers: Sequence[float]) -> Tensor:
    """The token of each row at which its cumulated shares pass the number, as a part of their sum: int64 [rows]."""
    cumulated = shares.cumsum(dim=1)
    total = cumulated[:, -1:]
    level = torch.tensor(numbers, dtype=torch.float64, device=shares.device).unsqueeze(1) * total
    passed = torch.searchsorted(cumulated, level, right=True).squeeze(1)  # right: past tokens that have no share
    return torch.minimum(passed, (cumulated < total).sum(dim=1))  # a number next to 1 may round to all of it
