"""Drafts the tokens that come next, with a block that is much smaller than the model (see models/deepseek_v4/mtp.py).

A step of a runner with a drafter:

    verify    one call of the model over each request's last token and its drafts
    choose    how many drafts stay, and the token after them (sampling.py)
    draft 1   one call of the drafter over the rows of the verification whose tokens stay, each with the id after it;
              rows of rejected drafts are padding. The row of the last such token gives the first draft
    draft 2   one call over one row a request: the first draft, with the drafter's own streams

Note "state of a rejected token". Every cache is written per position: the window cache, and the states of the
compressors, of which a block of 4 or 128 tokens, and for 4 the block before it, is pooled when its last token comes. So
nothing is rolled back, versioned or computed again, and a rejected token costs nothing. Its position is computed in the
next step of its request, which begins there, and all it wrote is written anew before anything reads it:

- Its window row and its states, at its own position. Who reads a row is at that position or after it.
- The compressed entries, main and indexer's, of blocks that it closed or that were closed after it. A block is seen
  from its last token on, that position is computed again, and closing the block pools all its states anew: those of
  tokens that stayed are as they were, whatever the phase of the block in which the rejection came.
- Blocks of a cache go back by the position that the request has reached, not by that of its last draft, so no row
  leaves its window on account of a token that was rejected.

The second draft writes the drafter's window row of a position whose streams the model has not made yet. The next step
writes that row anew, too, before a row after it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch._dynamo import mark_static

from ..errors import RunnerError
from ..models.deepseek_v4.step import StepState
from .batch import BatchBuilder, Span, said_of
from .limits import RunnerLimits
from .requests import Request
from .sampling import Choice, Drafts, draft_tokens
from .scheduler import Chunk
from .step_inputs import InputMaker

Drafter = Callable[[Tensor, Tensor, StepState, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCounts:
    """What became of the drafts of a runner.

    Attributes:
        calls: of the drafter, in steps.
        verifications: times that a request had drafts verified.
        drafted: tokens that were verified.
        accepted: how many of them stayed.
        accepted_by_place: of the first drafts, of the second.
    """

    calls: int = 0
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_place: tuple[int, ...] = ()

    def plus(self, num_drafted: int, num_accepted: int) -> DraftCounts:
        """With one more verification."""
        places = [*self.accepted_by_place, *[0] * (num_drafted - len(self.accepted_by_place))]
        return replace(
            self,
            verifications=self.verifications + 1,
            drafted=self.drafted + num_drafted,
            accepted=self.accepted + num_accepted,
            accepted_by_place=tuple(count + (place < num_accepted) for place, count in enumerate(places)),
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """A chunk after its call of the model.

    Attributes:
        chunk: what ran.
        tokens: the new tokens of its request: drafts that stay and one more; none if it is still in its prompt.
    """

    chunk: Chunk
    tokens: Sequence[int] = ()

    @property
    def request(self) -> Request:
        """Whose chunk it is."""
        return self.chunk.request

    @property
    def num_rejected(self) -> int:
        """Drafts at the end of the chunk that do not stay."""
        return len(self.chunk.drafts.tokens) + 1 - len(self.tokens) if self.tokens else 0

    @property
    def following(self) -> list[int]:
        """The ids after each token of the chunk that stays."""
        known = [*self.request.tokens, *self.tokens]
        return known[self.chunk.start + 1 : self.chunk.end - self.num_rejected + 1]

    @property
    def num_wanted(self) -> int:
        """How many drafts can be of use: the token after the last of them is the last that the request may get."""
        is_stopped = not self.request.stop_tokens.isdisjoint(self.tokens)
        return 0 if is_stopped or not self.tokens else max(self.request.missing - len(self.tokens) - 1, 0)


@dataclass(slots=True)
class Drafting:
    """Calls the drafter.

    Attributes:
        drafter: `drafter(input_ids [T], positions [T], step, streams [T, n, d]) -> (logits [T, vocab], streams)`.
        limits: of the runner.
        builder: makes batches.
        inputs: makes them tensors; those of the model's call are not read any more.
        counts: what became of the drafts.
    """

    drafter: Drafter
    limits: RunnerLimits
    builder: BatchBuilder
    inputs: InputMaker
    counts: DraftCounts = field(default=DraftCounts(), init=False)

    def draft(self, verified: Sequence[Verified], num_rows: Sequence[int], streams: Tensor) -> Mapping[int, Drafts]:
        """Drafts for the next step, by request id.

        Args:
            verified: the chunks of the step, in row order.
            num_rows: rows of each in the step.
            streams: [T, n, d], of the model for the rows of the step.
        """
        spans = [
            Span(_row(one.request), one.chunk.start, one.following, rows)
            for one, rows in zip(verified, num_rows, strict=True)
        ]
        logits, streams = self._call(spans, len(streams), streams)
        starts = accumulate(num_rows, initial=0)
        ends = [start + len(span.tokens) for start, span in zip(starts, spans, strict=False)]
        drafting = [(one, end - 1) for one, end in zip(verified, ends, strict=True) if one.num_wanted > 0]
        firsts = draft_tokens(logits, [_choice(one, 1, row) for one, row in drafting])
        drafts = {one.request.id: first for (one, _), first in zip(drafting, firsts, strict=True)}
        if self.limits.num_draft_tokens > 1:
            self._draft_second([pair for pair in drafting if self._has_room(pair[0])], drafts, streams)
        return drafts

    def pad(self, num_tokens: int, streams: Tensor) -> None:
        """A call in which every row is padding."""
        self._call((), num_tokens, streams)

    def count(self, verified: Verified) -> None:
        """Note what became of the drafts of a chunk."""
        if num_drafted := len(verified.chunk.drafts.tokens):
            self.counts = self.counts.plus(num_drafted, num_drafted - verified.num_rejected)

    def _has_room(self, verified: Verified) -> bool:
        """For the first draft, in the drafter's cache."""
        request = verified.request
        known = len(request.tokens) + len(verified.tokens)
        return verified.num_wanted > 1 and self.builder.blocks.covers(_row(request), known)

    def _draft_second(
        self, drafting: Sequence[tuple[Verified, int]], drafts: dict[int, Drafts], streams: Tensor
    ) -> None:
        if not drafting:
            return
        firsts = [drafts[one.request.id] for one, _ in drafting]
        spans = [
            Span(_row(one.request), len(one.request.tokens) + len(one.tokens) - 1, first.tokens, 1)
            for (one, _), first in zip(drafting, firsts, strict=True)
        ]
        padded = self.limits.padded(len(spans))
        rows = torch.zeros(padded, dtype=torch.int64)
        rows[: len(spans)] = torch.tensor([row for _, row in drafting])
        logits, _ = self._call(spans, padded, streams[rows.to(streams.device)])
        choices = [_choice(one, 2, index) for index, (one, _) in enumerate(drafting)]
        for (one, _), first, second in zip(drafting, firsts, draft_tokens(logits, choices), strict=True):
            drafts[one.request.id] = Drafts(first.tokens + second.tokens, first.shares + second.shares)

    def _call(self, spans: Sequence[Span], num_tokens: int, streams: Tensor) -> tuple[Tensor, Tensor]:
        made = self.inputs.make(self.builder.build(spans), num_tokens)
        self.counts = replace(self.counts, calls=self.counts.calls + bool(spans))
        with said_of([span.num_rows for span in spans], 1 + self.limits.num_draft_tokens):
            output = self.drafter(made.input_ids, made.positions, made.step, _as_input(streams))
        logits, made_streams = check_output(output, num_tokens, "drafter")
        if made_streams is None:
            raise RunnerError("the drafter returned logits alone; it must return (logits, streams)")
        return logits, made_streams


def check_output(output: object, num_tokens: int, who: str) -> tuple[Tensor, Tensor | None]:
    """Logits, and streams if there are any, of what a model or drafter returned for so many rows.

    Raises:
        RunnerError: something else, or for another number of rows.
    """
    logits, streams = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    for name, value, dims in (("logits", logits, 2), ("streams", streams, 3)):
        if not isinstance(value, Tensor) and (value is not None or name == "logits"):
            raise RunnerError(
                f"the {who} returned a {type(value).__name__} as {name}; it must return logits [T, vocab], or them and "
                "streams [T, n, hidden]"
            )
        if isinstance(value, Tensor) and (value.dim() != dims or len(value) != num_tokens):
            raise RunnerError(f"the {who} returned {name} of shape {tuple(value.shape)} for {num_tokens} tokens")
    assert isinstance(logits, Tensor)
    return logits, streams


def _as_input(streams: Tensor) -> Tensor:
    """The same memory as a tensor that Dynamo sees alike in every call: no view, since it guards what a view is of.

    Only the token count varies.
    """
    streams = streams.contiguous()
    alike = torch.empty(0, dtype=streams.dtype, device=streams.device)
    alike.set_(streams.untyped_storage(), streams.storage_offset(), streams.size(), streams.stride())
    for dim in range(1, alike.dim()):
        mark_static(alike, dim)
    return alike


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row


def _choice(verified: Verified, place: int, row: int) -> Choice:
    request = verified.request
    return Choice(request.sampling, len(request.tokens) + len(verified.tokens) + place - 1, row)
