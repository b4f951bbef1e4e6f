"""A request: what was asked, what is computed so far, and the checks that keep a bad one out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidRequestError
from .sampling import NO_DRAFTS, Drafts, Sampling


@dataclass(slots=True, eq=False)
class Request:
    """The bookkeeping of one request.

    Attributes:
        id: number of the request; smaller means it arrived earlier.
        tokens: the prompt, then what was generated.
        prompt_len: how many of them are the prompt.
        max_new_tokens: when to stop.
        stop_tokens: ids that end the request (they are part of the answer).
        sampling: how its tokens are drawn; None: the likeliest.
        num_computed: how many leading tokens are in the caches.
        row: its row in the block tables, None while it waits.
        drafts: tokens that may follow, to be verified in its next step; none while it has more than one to compute.
    """

    id: int
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling | None = None
    num_computed: int = 0
    row: int | None = None
    drafts: Drafts = NO_DRAFTS

    @property
    def remaining(self) -> int:
        """Tokens that are known but not computed; 1 while it decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def new_tokens(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.prompt_len :]

    @property
    def missing(self) -> int:
        """How many tokens it may still get."""
        return self.prompt_len + self.max_new_tokens - len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Add tokens to the answer, up to where it is finished; those that were added."""
        before = len(self.tokens)
        for token in tokens:
            if not self.is_finished:
                self.tokens.append(token)
        return tuple(self.tokens[before:])

    @property
    def is_finished(self) -> bool:
        """Whether it has all its tokens, or its last one is a stop token."""
        num_new = len(self.tokens) - self.prompt_len
        return num_new >= self.max_new_tokens or (num_new > 0 and self.tokens[-1] in self.stop_tokens)


def check_request(
    name: str, prompt: Sequence[int], max_new_tokens: int, *, vocab_size: int, max_model_len: int
) -> None:
    """Refuse a request that could never be served.

    Args:
        name: what to call it in the message, for example "request 3".
        prompt: token ids.
        max_new_tokens: how many tokens to generate.
        vocab_size: ids must be below it.
        max_model_len: prompt and answer together must fit in it.

    Raises:
        InvalidRequestError: with the numbers that are wrong.
    """
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InvalidRequestError(f"{name}: max_new_tokens is {max_new_tokens!r}; it must be an int of at least 1")
    if len(prompt) == 0:
        raise InvalidRequestError(f"{name}: the prompt is empty; give it at least one token id")
    if len(prompt) + max_new_tokens > max_model_len:
        raise InvalidRequestError(
            f"{name}: the prompt has {len(prompt)} tokens and {max_new_tokens} new ones are asked for, "
            f"but the runner's max_model_len is {max_model_len}"
        )
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequestError(
                f"{name}: prompt[{index}] is {token!r} of type {type(token).__name__}; token ids must be ints"
            )
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"{name}: prompt[{index}] is {token}; token ids go from 0 to {vocab_size - 1}")
