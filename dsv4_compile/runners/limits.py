"""The limits of a runner: checked once, when it is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import RunnerError
from ..models.deepseek_v4.config import DeepseekV4Config
from .block_allocator import BlockGroup

# More is not drafted with one block: each draft after the first is made from guesses alone.
MOST_DRAFTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerLimits:
    """How much a runner takes on.

    Attributes:
        config: of the model; what it was built for bounds the rest.
        max_num_reqs: requests that run at once, at least 2.
        max_num_batched_tokens: tokens of a step at most.
        max_model_len: tokens of a request at most, answer included.
        buckets: token counts that steps are padded to, ascending.
        num_draft_tokens: tokens drafted after each one that is known.

    Raises:
        RunnerError: a limit that makes no sense, or more than the model was built for.
    """

    config: DeepseekV4Config
    max_num_reqs: int
    max_num_batched_tokens: int
    max_model_len: int
    buckets: Sequence[int] = ()
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        config = self.config
        _check("max_num_reqs", self.max_num_reqs, 2, None, "a request dimension of 1 would be specialised")
        tokens = config.max_num_batched_tokens
        _check("num_draft_tokens", self.num_draft_tokens, 0, MOST_DRAFTS, "")
        least = 1 + self.num_draft_tokens
        _check("max_num_batched_tokens", self.max_num_batched_tokens, least, tokens, "rows of the model's top-k buffer")
        positions = config.max_position_embeddings
        _check("max_model_len", self.max_model_len, 2, positions, "the model's max_position_embeddings")
        for bucket in self.buckets:
            _check("bucket", bucket, 1, self.max_num_batched_tokens, "max_num_batched_tokens")
        object.__setattr__(self, "buckets", tuple(sorted(self.buckets)))

    def padded(self, num_tokens: int) -> int:
        """The smallest bucket that holds the tokens; their own number if there is none."""
        return next((bucket for bucket in self.buckets if bucket >= num_tokens), num_tokens)

    def count_blocks(self, groups: Iterable[BlockGroup], given: Mapping[str, int]) -> dict[str, int]:
        """Blocks of every group: what was given, else enough that no step of these limits runs out.

        Raises:
            RunnerError: an unknown group or a count below 1.
        """
        counts = {group.name: self._enough_blocks(group) for group in groups}
        for name, count in given.items():
            if name not in counts:
                raise RunnerError(f"num_blocks has an unknown group {name!r}; the groups are {', '.join(counts)}")
            _check(f"num_blocks[{name!r}]", count, 1, None, "")
        return counts | dict(given)

    def _enough_blocks(self, group: BlockGroup) -> int:
        """Each request holds its window and the blocks of its chunk, two of them perhaps only in part.

        Drafts that were rejected leave it with blocks it will need soon, and the drafter writes ahead of the chunk.
        """
        whole = self.max_num_reqs * group.end_block(self.max_model_len)
        if group.window is None:
            return whole
        windows = self.max_num_reqs * (group.end_block(group.window - 1 + 2 * self.num_draft_tokens) + 2)
        return min(whole, windows + group.end_block(self.max_num_batched_tokens))


def _check(name: str, value: int, least: int, most: int | None, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        reason = f" ({why})" if why else ""
        raise RunnerError(f"{name} is {value!r}; it must be an int, {allowed}{reason}")
