"""The serving loop: requests in, one model call a step, tokens out.

`ModelRunnerV1` and `ModelRunnerV2` share everything but how step tensors are made (see `step_inputs.py`), which is
what decides how much of a model may be captured. Both take the likeliest token, or draw one, after the last token of
each request's chunk; with a drafter a step has several tokens for a request (see `drafting.py`).

A step either happens or it does not: requests advance only after the model returned, so a call that raises leaves
every request and its blocks as they were, and the next step runs the same chunks again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import InvalidRequestError, OutOfBlocksError, RunnerError
from ..log import progress_bar
from ..models.deepseek_v4.config import DeepseekV4Config
from ..models.deepseek_v4.step import StepState
from .batch import BatchBuilder, block_groups, said_of
from .block_allocator import BlockAllocator
from .bound_caches import BoundCaches
from .drafting import DraftCounts, Drafter, Drafting, Verified, check_output
from .limits import RunnerLimits
from .lockstep import Lockstep
from .requests import Request, check_request
from .sampling import NO_DRAFTS, Choice, Drafts, Sampling, choose
from .scheduler import Chunk, Scheduler
from .step_inputs import FreshInputs, InputMaker, ModelInputs, PersistentInputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Model = Callable[[Tensor, Tensor, StepState], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did.

    Attributes:
        scheduled: (request id, first position, end position) of every chunk, drafts included, in row order.
        new_tokens: the tokens that each request got, by request id, one without drafts; requests still in their prompt
            got none and are not here.
        finished: all new tokens of the requests that ended with this step; the runner has forgotten them.
    """

    scheduled: tuple[tuple[int, int, int], ...]
    new_tokens: Mapping[int, tuple[int, ...]]
    finished: Mapping[int, list[int]]


class ModelRunner(ABC):
    """What the runners share; use `ModelRunnerV1` or `ModelRunnerV2`.

    Args:
        model: `model(input_ids [T], positions [T], step) -> logits [T, vocab]`, compiled or not; or `(logits, streams)`
            with residual streams [T, n, hidden], which a drafter needs.
        config: the sizes the model was built with.
        max_num_reqs: requests that run at once, at least 2; more than that wait.
        max_num_batched_tokens: tokens of a step at most; longer prompts are prefilled in chunks of it.
        max_model_len: tokens of a request at most, answer included.
        num_blocks: blocks of the groups "swa", "compressed", "c4_state", "c128_state"; a group left out gets enough
            that nobody is ever preempted.
        buckets: token counts a step is padded to, the smallest that fits; a step above all of them, or every step if
            None, runs unpadded.
        device: where the caches and inputs live; None: where the attention layers are.
        attention: the module that holds the attention layers; needed only if `model` is not a module itself.
        kv_cache_dtype, index_cache_dtype: formats of the caches, instead of those of `config`; a model that was built
            for a format takes no other.
        drafter: `drafter(input_ids [T], positions [T], step, streams [T, n, hidden]) -> (logits, streams)`, compiled or
            not, such as an `MTPBlock`; where it is a module with attention layers that `attention` has not, they are
            given caches too.
        num_draft_tokens: tokens it drafts for each request in a step, 1 or 2; the model verifies them in the next step.
            Answers are those without a drafter, in fewer steps. 0 without a drafter.
        group: the ranks that the model is spread over, each with a runner of its own that is given the same requests in
            the same order; None: the `process_group` of `attention` or of the model, if it has one. See `lockstep.py`.

    Raises:
        UnsupportedConfigError: no such format.
        CacheBindingError: the configuration is not that of the model, or the model was built for another format.
        RunnerError: an argument that makes no sense, or no attention layer to bind the caches to.
    """

    def __init__(
        self,
        model: Model,
        config: DeepseekV4Config,
        *,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: Mapping[str, int] | None = None,
        buckets: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        attention: nn.Module | None = None,
        kv_cache_dtype: str | torch.dtype | None = None,
        index_cache_dtype: str | torch.dtype | None = None,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
        group: ProcessGroup | None = None,
    ) -> None:
        self.model = model
        config = config.with_cache_dtypes(kv_cache_dtype, index_cache_dtype)
        self.limits = RunnerLimits(
            config=config,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            buckets=tuple(buckets or ()),
            num_draft_tokens=num_draft_tokens,
        )
        _check_drafter(drafter, num_draft_tokens)
        groups = block_groups(config)
        counts = self.limits.count_blocks(groups, num_blocks or {})
        self.blocks = BlockAllocator(groups, counts, max_num_reqs, max_model_len)
        self._caches = BoundCaches(model if attention is None else attention, config, counts, device, drafter)
        self._scheduler = Scheduler(self.blocks, max_num_reqs, max_num_batched_tokens, num_draft_tokens)
        self._builder = BatchBuilder(config, self.blocks, max_num_reqs)
        self._inputs = self._make_inputs(self._caches.device)
        self._drafting = Drafting(drafter, self.limits, self._builder, self._inputs) if drafter is not None else None
        holder = model if attention is None else attention
        self._ranks = Lockstep(getattr(holder, "process_group", None) if group is None else group, self._caches.device)
        self._active: dict[int, Request] = {}
        self._ids = count()

    @abstractmethod
    def _make_inputs(self, device: torch.device) -> InputMaker:
        """How this runner hands step tensors to the model."""

    @property
    def num_active(self) -> int:
        """Requests that wait or run."""
        return len(self._active)

    @property
    def draft_counts(self) -> DraftCounts:
        """What became of the drafts so far; zeros without a drafter."""
        return self._drafting.counts if self._drafting else DraftCounts()

    def add_request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_tokens: Iterable[int] = (),
        sampling: Sampling | None = None,
    ) -> int:
        """Let a request join; it starts with the next step that has room.

        Args:
            prompt: token ids.
            max_new_tokens: how many tokens to generate at most.
            stop_tokens: ids that end the answer early; they are part of it.
            sampling: how tokens are drawn; None: the likeliest.

        Returns:
            The id of the request.

        Raises:
            InvalidRequestError: an empty prompt, one that is too long, or a token id out of range.
            OutOfBlocksError: the whole pool could not hold the request.
        """
        request_id = next(self._ids)
        self._check(f"request {request_id}", prompt, max_new_tokens)
        request = Request(request_id, list(prompt), len(prompt), max_new_tokens, frozenset(stop_tokens), sampling)
        self._active[request_id] = request
        self._scheduler.add(request)
        return request_id

    def cancel_request(self, request_id: int) -> None:
        """Let a request leave before it is finished; its blocks go back.

        Raises:
            InvalidRequestError: there is no such request, or not any more.
        """
        if request_id not in self._active:
            raise InvalidRequestError(f"request {request_id} is not active: it ended already or was never added")
        self._scheduler.remove(self._active.pop(request_id))

    @torch.no_grad()
    def step(self) -> StepResult:
        """Run one batch: decodes first, then prefills; an idle runner does nothing.

        Raises:
            RunnerError: another runner has bound its caches to the model, the logits have the wrong shape, or another
                rank is about to run another step.
            Exception: what the model raises; the requests are as before the call.
        """
        self._caches.check()
        chunks = self._scheduler.schedule()
        self._ranks.check(chunks)
        if not chunks:
            return StepResult(scheduled=(), new_tokens={}, finished={})
        num_rows = [self._scheduler.num_rows(chunk) for chunk in chunks]
        logits, streams = self._run(chunks, num_rows)
        verified = self._ranks.agreed_tokens(_verify(chunks, num_rows, logits))
        drafts = self._drafting.draft(verified, num_rows, streams) if self._drafting and streams is not None else {}
        return self._commit(verified, self._ranks.agreed_drafts(drafts))

    @torch.no_grad()
    def run_padding(self, num_tokens: int) -> None:
        """Call the model, and after it the drafter if there is one, on a step in which every row is padding.

        `dsv4_compile.capture(runner.run_padding, lambda size: (size,), sizes)` warms up and captures both.

        Raises:
            RunnerError: a step never has so many tokens.
        """
        inputs = self.padding_inputs(num_tokens)
        streams = self._call_model(inputs, num_tokens)[1]
        if self._drafting and streams is not None:
            self._drafting.pad(num_tokens, streams)

    def padding_inputs(self, num_tokens: int) -> ModelInputs:
        """Inputs of a step in which every row is padding: it writes no cache, so it can warm up or capture a model.

        Args:
            num_tokens: rows of the step, which no bucket rounds up.

        Returns:
            input_ids and positions [num_tokens] int64, and a step state of no request, in the buffers of real steps
            where the runner keeps such.

        Raises:
            RunnerError: a step never has so many tokens.
        """
        most = self.limits.max_num_batched_tokens
        if not 0 <= num_tokens <= most:
            raise RunnerError(
                f"padding_inputs({num_tokens}): a step has at most {most} tokens (max_num_batched_tokens)"
            )
        return self._inputs.make(self._builder.build(()), num_tokens)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        progress: bool | None = None,
        stop_tokens: Iterable[int] = (),
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """Answer all prompts.

        Args:
            prompts: token ids, one sequence a prompt.
            max_new_tokens: how many tokens to generate for each at most.
            progress: show a bar or not; None: on a terminal.
            stop_tokens: ids that end an answer early; they are part of it.
            sampling: how tokens are drawn, for all prompts alike; None: the likeliest.

        Returns:
            The new tokens of each prompt.

        Raises:
            InvalidRequestError, OutOfBlocksError: as `add_request`; raised before anything runs.
            RunnerError: other requests are active, whose results would be lost.
        """
        if self._active:
            raise RunnerError(f"generate needs an idle runner, and {self.num_active} requests are active; use step()")
        stop_tokens = frozenset(stop_tokens)
        for index, prompt in enumerate(prompts):
            self._check(f"prompt {index}", prompt, max_new_tokens)
        ids = [self.add_request(prompt, max_new_tokens, stop_tokens, sampling) for prompt in prompts]
        answers: dict[int, list[int]] = {}
        try:
            with progress_bar(len(ids) * max_new_tokens, "tok", progress) as advance:
                while self._active:
                    result = self.step()
                    answers.update(result.finished)
                    advance(sum(map(len, result.new_tokens.values())))
        finally:
            for request_id in tuple(self._active):
                self.cancel_request(request_id)
        return [answers[request_id] for request_id in ids]

    def _check(self, name: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        limits = self.limits
        check_request(
            name, prompt, max_new_tokens, vocab_size=limits.config.vocab_size, max_model_len=limits.max_model_len
        )
        # the last token of an answer is never fed back, so it needs no room
        if reason := self.blocks.shortage(len(prompt) + max_new_tokens - 1):
            raise OutOfBlocksError(f"{name} needs {reason}; build the runner with more num_blocks or ask for less")

    def _run(self, chunks: Sequence[Chunk], num_rows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        host = self._builder.build([chunk.span(rows) for chunk, rows in zip(chunks, num_rows, strict=True)])
        num_tokens = self.limits.padded(len(host["input_ids"]))
        inputs = self._inputs.make(host, num_tokens)
        with said_of(num_rows, self._scheduler.least_rows):
            return self._call_model(inputs, num_tokens)

    def _call_model(self, inputs: ModelInputs, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        output = self.model(inputs.input_ids, inputs.positions, inputs.step)
        logits, streams = check_output(output, num_tokens, "model")
        if self._drafting and streams is None:
            raise RunnerError(
                "the model returned logits alone, and a drafter needs the streams beside them: load the checkpoint "
                "with mtp=True, or leave out the drafter"
            )
        return logits, streams

    def _commit(self, verified: Sequence[Verified], drafts: Mapping[int, Drafts]) -> StepResult:
        finished, new_tokens = {}, {}
        for one in verified:
            self._scheduler.commit(one.chunk, one.num_rejected)
            request = one.request
            if one.tokens:
                new_tokens[request.id] = request.extend(one.tokens)
                request.drafts = drafts.get(request.id, NO_DRAFTS)
            if self._drafting:
                self._drafting.count(one)
            if request.is_finished:
                finished[request.id] = request.new_tokens
                self.cancel_request(request.id)
        scheduled = tuple((one.request.id, one.chunk.start, one.chunk.end) for one in verified)
        return StepResult(scheduled=scheduled, new_tokens=new_tokens, finished=finished)


class ModelRunnerV1(ModelRunner):
    """mrv1: new step tensors every step."""

    def _make_inputs(self, device: torch.device) -> InputMaker:
        return FreshInputs(device)


class ModelRunnerV2(ModelRunner):
    """mrv2: step tensors live in persistent padded buffers, complete before the first step."""

    def _make_inputs(self, device: torch.device) -> InputMaker:
        return PersistentInputs(self._builder.build(()), self.limits.max_num_batched_tokens, device)


def _verify(chunks: Sequence[Chunk], num_rows: Sequence[int], logits: Tensor) -> list[Verified]:
    """The new tokens of each request whose chunk is its last."""
    starts = accumulate(num_rows, initial=0)
    choices = {}
    for start, chunk in zip(starts, chunks, strict=False):
        if chunk.is_last:
            request, drafts = chunk.request, chunk.drafts
            row = start + chunk.num_tokens - len(drafts.tokens) - 1
            choices[request.id] = Choice(request.sampling, len(request.tokens), row, drafts)
    tokens = dict(zip(choices, choose(logits, list(choices.values())), strict=True))
    return [Verified(chunk, tokens.get(chunk.request.id, ())) for chunk in chunks]


def _check_drafter(drafter: object, num_draft_tokens: int) -> None:
    if (drafter is None) != (num_draft_tokens == 0):
        raise RunnerError(
            f"num_draft_tokens is {num_draft_tokens} and drafter is {'None' if drafter is None else 'given'}: give "
            "both a drafter and how many tokens it drafts, or neither"
        )
    if drafter is not None and not callable(drafter):
        raise RunnerError(f"drafter is a {type(drafter).__name__}; it must be callable, such as an MTPBlock")
