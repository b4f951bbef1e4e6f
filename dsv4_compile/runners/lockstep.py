"""Keeps the runners of several ranks in step: the same chunks in every step, and the tokens that rank 0 has sampled.

Every rank of a sharded model has a runner of its own, given the same requests in the same order, so their schedules are
equal by themselves. That is checked and not assumed: before a step, the ranks compare what each is about to run, since
a rank that ran another batch would meet the others in the wrong collective. After it, all take the tokens of rank 0:
the logits of two ranks may differ in the last bit, and a token that differs once makes all that follows differ.

Both are one small collective a step, on the device of the caches. A rank that steps while another one does not waits
for it as long as the process group does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..errors import RunnerError
from .drafting import Verified
from .sampling import Drafts
from .scheduler import Chunk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NONE = -1  # no token


class Lockstep:
    """What the ranks of a group tell each other in a step; without a group, nothing.

    Args:
        group: the ranks.
        device: where their tensors are, that the group's backend works on.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Go on if every rank is about to run the same chunks.

        Raises:
            RunnerError: another rank is about to run others, or does not answer. No rank has run anything then.
        """
        if self._group is None:
            return
        own = torch.tensor([_digest(chunks)], dtype=torch.int64, device=self._device)
        every = [torch.empty_like(own) for _ in range(self._group.size())]
        self._exchange(lambda group: torch.distributed.all_gather(every, own, group=group))
        if len({digest.item() for digest in every}) > 1:
            self._refuse(chunks)

    def _refuse(self, chunks: Sequence[Chunk]) -> None:
        assert self._group is not None, "ranks differ"
        schedules: list[str] = [""] * self._group.size()
        shown = ", ".join(f"request {chunk.request.id} [{chunk.start}, {chunk.end})" for chunk in chunks)
        own = f"{shown or 'nothing'} (digest {_digest(chunks) & 0xFFFF:04x})"
        self._exchange(lambda group: torch.distributed.all_gather_object(schedules, own, group=group))
        told = "; ".join(f"rank {rank}: {schedule}" for rank, schedule in enumerate(schedules))
        raise RunnerError(
            f"the ranks are about to run different steps. {told}. Add and cancel the same requests in the same order "
            "on every rank, between the same steps"
        )

    def agreed_tokens(self, verified: Sequence[Verified]) -> list[Verified]:
        """The new tokens that rank 0 has sampled, as many as stay of its drafts.

        Raises:
            RunnerError: another rank does not answer.
        """
        if self._group is None:
            return list(verified)
        widths = [1 + len(one.chunk.drafts.tokens) if one.tokens else 0 for one in verified]
        chosen = self._of_rank_0([one.tokens for one in verified], widths)
        return [replace(one, tokens=tokens) for one, tokens in zip(verified, chosen, strict=True)]

    def agreed_drafts(self, drafts: Mapping[int, Drafts]) -> dict[int, Drafts]:
        """The tokens that the drafter of rank 0 has drafted, by request id; each rank keeps its own distributions.

        Raises:
            RunnerError: another rank does not answer.
        """
        if self._group is None:
            return dict(drafts)
        tokens = self._of_rank_0([one.tokens for one in drafts.values()], [len(d.tokens) for d in drafts.values()])
        return {id: Drafts(own, drafts[id].shares) for id, own in zip(drafts, tokens, strict=True)}

    def _of_rank_0(self, tokens: Sequence[Sequence[int]], widths: Sequence[int]) -> list[tuple[int, ...]]:
        """Rows of tokens, at most so many in each, as rank 0 has them."""
        if not any(widths):
            return [() for _ in widths]
        padded = [[*row, *[_NONE] * (width - len(row))] for row, width in zip(tokens, widths, strict=True)]
        flat = torch.tensor([token for row in padded for token in row], dtype=torch.int64, device=self._device)
        self._exchange(lambda group: torch.distributed.broadcast(flat, group=group, group_src=0))
        numbers = iter(flat.tolist())
        rows = [[next(numbers) for _ in range(width)] for width in widths]
        return [tuple(token for token in row if token != _NONE) for row in rows]

    def _exchange(self, exchange: Callable[[ProcessGroup], object]) -> None:
        assert self._group is not None, "there is somebody to talk to"
        try:
            exchange(self._group)
        except Exception as error:  # of the backend
            raise RunnerError(
                f"rank {self._group.rank()} of {self._group.size()} got no answer from the others in a step: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}. Another rank has failed, has ended, or "
                "steps no more: look at what the others say first"
            ) from error


def _digest(chunks: Sequence[Chunk]) -> int:
    """A number for what a step runs, tokens included."""
    told = [(c.request.id, c.start, c.end, c.request.tokens[c.start : c.end], list(c.drafts.tokens)) for c in chunks]
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=8).digest(), "little", signed=True)
