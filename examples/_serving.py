"""Parts of the serving example: a small random checkpoint, text in and out, and one measured run of a batch.

Times are of this run alone and end with the sampled token on the host, so they hold on any device.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DeepseekV4Config, DeepseekV4ForCausalLM

import dsv4_compile
from dsv4_compile.errors import UnsupportedConfigError
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.integrations.transformers_mtp import WithMTP
from dsv4_compile.log import pluralize, progress_bar
from dsv4_compile.runners import DraftCounts, ModelRunner

RATIOS = (0, 4, 128)  # the three kinds of layer, in turn
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class ByteTokenizer:
    """Text as its UTF-8 bytes, for checkpoints without a tokenizer; ids above 255 show as numbers."""

    def encode(self, text: str) -> list[int]:
        """One token a byte."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Printable ASCII as it is, all else as a number in brackets."""
        return "".join(chr(token) if 32 <= token < 127 else f"<{token}>" for token in tokens)


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's own tokenizer, or bytes if it has none.

    Raises:
        UnsupportedConfigError: it has one that cannot be loaded.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return ByteTokenizer()
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever its parsers raise, tokenizers' own being no more than an Exception
        raise UnsupportedConfigError(
            f"its tokenizer cannot be loaded: {type(error).__name__}: {error}; copy it again, or remove "
            f"{', '.join(TOKENIZER_FILES)} to serve bytes"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What one configuration answered, and what it took.

    Attributes:
        answers: new tokens of each prompt.
        first_token_s: seconds from the start to a request's first token, mean over the requests, waiting included.
        decode_step_s: seconds of a step in which every request decodes; the median; None if there was no such step.
        num_steps: calls of the model.
        replays: calls, of the model and of a drafter, that a captured program served.
        eager_ops: ops launched one by one in eager regions, over all steps.
        drafts: what became of drafted tokens.
    """

    answers: list[list[int]]
    first_token_s: float
    decode_step_s: float | None
    num_steps: int
    replays: int
    eager_ops: int
    drafts: DraftCounts

    @property
    def num_calls(self) -> int:
        """Calls of the model, and of a drafter."""
        return self.num_steps + self.drafts.calls


def serve_batch(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int, stop_tokens: Iterable[int]
) -> Served:
    """Add all requests at once and step until the last one is finished.

    Raises:
        InvalidRequestError, OutOfBlocksError: a prompt that the runner cannot serve.
    """
    ids = [runner.add_request(prompt, num_tokens, stop_tokens) for prompt in prompts]
    answers: dict[int, list[int]] = {}
    first: dict[int, float] = {}
    decodes: list[float] = []
    num_steps = 0
    with progress_bar(len(ids) * num_tokens, "tok") as advance:
        before, start = dsv4_compile.counters.snapshot(), time.perf_counter()
        while runner.num_active:
            begin = time.perf_counter()
            result = runner.step()
            now = time.perf_counter()
            num_steps += 1
            if all(end <= begin_at + 1 + runner.limits.num_draft_tokens for _, begin_at, end in result.scheduled):
                decodes.append(now - begin)
            first |= {request: now - start for request in result.new_tokens if request not in first}
            answers |= result.finished
            advance(sum(map(len, result.new_tokens.values())))
    after = dsv4_compile.counters.snapshot()
    return Served(
        answers=[answers[request] for request in ids],
        first_token_s=statistics.mean(first.values()),
        decode_step_s=statistics.median(decodes) if decodes else None,
        num_steps=num_steps,
        replays=after["replays"] - before["replays"],
        eager_ops=after["eager_op_calls"] - before["eager_op_calls"],
        drafts=runner.draft_counts,
    )


def trace_decode_step(runner: ModelRunner, prompts: Sequence[Sequence[int]], path: Path) -> None:
    """Write a Chrome trace of a step in which up to four requests decode; the runner must be idle and captured.

    Raises:
        OSError: the file cannot be written.
    """
    for prompt in prompts[:4]:
        runner.add_request(prompt[:8], max_new_tokens=2)
    runner.step()  # the prompts, short enough for one step
    with torch.profiler.profile() as profiler:
        runner.step()
    profiler.export_chrome_trace(str(path))


def summarise_plan(name: str, plan: Plan) -> Iterator[str]:
    """A few lines: how much is captured, and the eager ops by reason."""
    captured, eager = (pluralize(sum(len(unit.ops) for unit in units), "op") for units in (plan.pieces, plan.regions))
    pieces, regions = pluralize(len(plan.pieces), "piece"), pluralize(len(plan.regions), "region")
    yield f"{name}: {pieces} captured ({captured}), {regions} eager ({eager})"
    ops = [(op.reason, op.name) for unit in plan.regions for op in unit.ops]
    for reason in dict(ops):
        times = Counter(op for why, op in ops if why == reason)
        yield f"    {reason}: {', '.join(f'{op} x{count}' for op, count in times.items())}"


def reference(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The same prompt, alone and unpaged, by transformers."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    new_tokens: list[int] = generated[0, len(prompt) :].tolist()
    return new_tokens


def stop_tokens(model: Any) -> list[int]:
    """The ids at which transformers would stop."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def small_checkpoint_folder(num_layers: int, *, mtp: bool = False) -> Path:
    """Where the small random checkpoint of so many layers is kept; one with an MTP block has a folder of its own."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dsv4_compile" / f"small-{num_layers}-layers{'-mtp' if mtp else ''}"


def small_checkpoint(num_layers: int, *, mtp: bool = False) -> Path:
    """The folder of a small random checkpoint, made if it is not there yet.

    Raises:
        OSError: it cannot be made.
    """
    folder = small_checkpoint_folder(num_layers, mtp=mtp)
    if not folder.is_dir():
        cache = folder.parent
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot make {cache}: {error.strerror}; XDG_CACHE_HOME names another folder") from error
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            random_model(num_layers, mtp=mtp).save_pretrained(Path(unfinished) / "checkpoint")
            try:
                (Path(unfinished) / "checkpoint").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    return folder


def random_model(num_layers: int, *, mtp: bool = False) -> DeepseekV4ForCausalLM:
    """A DeepSeek V4 with small sizes and random weights, those that are made as zeros included."""
    config = DeepseekV4Config(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        num_experts_per_tok=2,
        n_routed_experts=8,
        max_position_embeddings=4096,
        compress_ratios=[RATIOS[layer % 3] for layer in range(num_layers)],
        num_hash_layers=1,
        hc_sinkhorn_iters=4,  # each is a handful of ops, twice a layer, and 20 of them triple the time to compile
        o_groups=2,
        o_lora_rank=16,
        index_head_dim=16,
        index_topk=16,
        rope_parameters={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
    )
    model = (WithMTP if mtp else DeepseekV4ForCausalLM)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + name.endswith("norm.weight"))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts a token goes to in the first layers
                buffer.random_(config.n_routed_experts, generator=generator)
        if mtp:
            make_alike(model)
    return model


def make_alike(model: WithMTP) -> None:
    """Let the next token hang mostly on the last one, for the model and for its MTP block: then many drafts are right.

    What a trained block has learnt from the model, a random one cannot know.
    """
    block: Any = model.mtp[0]
    model.model.embed_tokens.weight.mul_(40)
    block.e_proj.weight.copy_(50 * torch.eye(model.config.hidden_size))
    block.enorm.weight.fill_(1)
    block.kv_norm.weight.copy_(model.model.norm.weight)
