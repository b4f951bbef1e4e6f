"""What the ranks of a process group have to agree on while buckets are captured ahead, and who differs.

A model with collectives in it hangs, or computes garbage, where one rank makes a call that another does not. So before
calls are made, every rank tells what it is about to do, and goes on only if all do the same. A rank that cannot go on
says so here too, instead of leaving the others to their timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Result = TypeVar("Result")


class Agreement:
    """Asks all ranks of a group; without a group there is nobody else.

    Args:
        group: a process group.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def same(self, what: str, value: object) -> None:
        """Go on if all ranks have an equal value.

        Raises:
            ArgumentError: they have not; it tells which rank has which.
        """
        from ..errors import ArgumentError

        values = self._gathered(value)
        if any(other != values[0] for other in values):
            shown = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in _by_text(values).items())
            raise ArgumentError(f"capture: the ranks of the group differ in {what}. {shown}. Give all ranks the same")

    def any(self, value: bool) -> bool:
        """Whether it is so on any rank."""
        return any(self._gathered(value))

    def all_made(self, what: str, make: Callable[[], Result]) -> Result:
        """What a function of this rank returns, if that of no rank raises.

        Raises:
            CaptureError: that of another rank has.
            Exception: what this one has raised.
        """
        from ..errors import CaptureError

        if self._group is None:
            return make()
        try:
            made = make()
        except Exception as error:
            self._gathered(f"{type(error).__name__}: {error}")
            raise
        failed = {rank: text for rank, text in enumerate(self._gathered(None)) if text is not None}
        if failed:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise CaptureError(f"capture: {what} failed on another rank of the group. {told}")
        return made

    def _gathered(self, value: Result) -> list[Result]:
        """The values of all ranks, by rank."""
        if self._group is None:
            return [value]
        gathered: list[Result] = [value] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(gathered, value, group=self._group)
        return gathered


def _by_text(values: list[Result]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ranks


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
