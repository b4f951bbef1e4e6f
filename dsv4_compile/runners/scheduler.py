"""Which requests run in the next step, and with how many tokens.

A step has a budget of tokens. Running requests go on first, then waiting ones join in the order of their arrival; a
prompt that is longer than what is left of the budget is prefilled in chunks, and nobody joins after it until it is
through. So the running requests are the earliest of all, in order, and only the last of them can be in its prompt:
decodes come before prefills by themselves.

When the blocks run out, the youngest running request is *preempted*: it gives back all its blocks and waits; later
it recomputes the tokens it has, those it generated included, and goes on. No request fails in the middle of its
answer, and the earliest one can always advance, because a request that a whole pool cannot hold was refused when it
was added. A waiting request joins only when its whole chunk fits, or when nothing else runs.

With drafts a request that decodes runs its last token and the drafts after it. Drafts take blocks only where some are
free, and preempt nobody. So that batches are uniform, every chunk has at least `1 + num_draft_tokens` rows of the step,
padding where it has fewer tokens, and rows are what the budget counts.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from .batch import Span
from .block_allocator import BlockAllocator
from .requests import Request
from .sampling import NO_DRAFTS, Drafts


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens [start, end) of a request, which run in one step.

    Attributes:
        request: whose tokens.
        start, end: positions; what comes after the known tokens are drafts.
        drafts: of which the last `end - len(request.tokens)` tokens are.
    """

    request: Request
    start: int
    end: int
    drafts: Drafts = NO_DRAFTS

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the next token of the request comes out of this chunk."""
        return self.end == len(self.request.tokens) + len(self.drafts.tokens)

    @property
    def tokens(self) -> list[int]:
        """Token ids from `start` to `end`."""
        return [*self.request.tokens[self.start : self.end], *self.drafts.tokens]

    def span(self, num_rows: int | None = None) -> Span:
        """The tokens as a batch has them; None: as many rows as there are tokens."""
        assert self.request.row is not None
        return Span(self.request.row, self.start, self.tokens, self.num_tokens if num_rows is None else num_rows)


@dataclass(slots=True)
class Scheduler:
    """Requests, waiting and running, and the rows and blocks they hold.

    Attributes:
        blocks: the allocator; requests hold rows of it while they run.
        max_num_reqs: how many requests run at once; not more than the allocator has rows.
        max_num_batched_tokens: the budget of a step.
        num_draft_tokens: how many tokens are drafted after each one that is known.
    """

    blocks: BlockAllocator
    max_num_reqs: int
    max_num_batched_tokens: int
    num_draft_tokens: int = 0
    _waiting: list[Request] = field(default_factory=list, init=False)
    _running: list[Request] = field(default_factory=list, init=False)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        insort(self._waiting, request, key=lambda waiting: waiting.id)

    def remove(self, request: Request) -> None:
        """Forget a request and give back what it holds."""
        if request.row is None:
            self._waiting.remove(request)
        else:
            self._release(request)

    def schedule(self) -> tuple[Chunk, ...]:
        """The chunks of the next step, decodes first; their blocks are allocated. Empty if there is no request."""
        plan: list[Chunk] = []
        num_running = len(self._running)
        for request in tuple(self._running):
            self._continue(request, plan)
        if len(self._running) == num_running:  # else a preempted request would come back at once
            self._admit(plan)
        for chunk in plan:
            self._make_room_for_drafting(chunk)
        return tuple(sorted(plan, key=lambda chunk: chunk.num_tokens > self.least_rows))

    @property
    def least_rows(self) -> int:
        """Rows that a chunk has in a step at least."""
        return 1 + self.num_draft_tokens

    def num_rows(self, chunk: Chunk) -> int:
        """Rows that a chunk has in its step."""
        return max(chunk.num_tokens, self.least_rows)

    def commit(self, chunk: Chunk, num_rejected: int = 0) -> None:
        """Record what is computed of a chunk: all but rejected drafts; blocks that left every window go back."""
        request, end = chunk.request, chunk.end - num_rejected
        assert request.row is not None
        request.num_computed = end
        self.blocks.release_before(request.row, end)

    def _continue(self, request: Request, plan: list[Chunk]) -> None:
        while request.row is not None and (wanted := self._wanted(request, plan)):
            if fit := self.blocks.tokens_that_fit(request.row, request.num_computed, wanted):
                self._grant(request, fit, plan)
                return
            self._preempt(self._running[-1])  # itself, or one that this step has not reached yet

    def _admit(self, plan: list[Chunk]) -> None:
        while self._waiting and len(self._running) < self.max_num_reqs:
            request = self._waiting[0]
            wanted = self._wanted(request, plan)
            row = self.blocks.open_row()
            fit = self.blocks.tokens_that_fit(row, 0, wanted)
            if fit == 0 or (fit < wanted and self._running):
                self.blocks.close_row(row)
                return
            self._waiting.pop(0)
            self._running.append(request)
            request.row = row
            self._grant(request, fit, plan)

    def _wanted(self, request: Request, plan: list[Chunk]) -> int:
        left = self.max_num_batched_tokens - sum(map(self.num_rows, plan))
        return 0 if left < self.least_rows else min(request.remaining + len(request.drafts.tokens), left)

    def _grant(self, request: Request, num_tokens: int, plan: list[Chunk]) -> None:
        assert request.row is not None
        end = request.num_computed + num_tokens
        self.blocks.extend(request.row, end)
        drafts = request.drafts.first(max(end - len(request.tokens), 0))
        plan.append(Chunk(request, request.num_computed, end, drafts))

    def _make_room_for_drafting(self, chunk: Chunk) -> None:
        """Blocks, if there are any, for what the drafter writes after the chunk: all drafts but the last."""
        row, most = chunk.request.row, chunk.request.prompt_len + chunk.request.max_new_tokens
        wanted = min(chunk.end + self.num_draft_tokens - 1, most) - chunk.end
        if chunk.is_last and row is not None and wanted > 0:
            self.blocks.extend(row, chunk.end + self.blocks.tokens_that_fit(row, chunk.end, wanted))

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed = 0
        request.drafts = NO_DRAFTS
        self.add(request)

    def _release(self, request: Request) -> None:
        assert request.row is not None
        self._running.remove(request)
        self.blocks.close_row(request.row)
        request.row = None
