"""From a checkpoint to served tokens, once eagerly and once for each way to place the eager holes.

Without `--model` it makes a small random checkpoint once, in a cache folder and in the standard format; with random
weights the answers mean nothing, but they must be the same. Four requests run at once, a fifth joins when one leaves,
and a long prompt is prefilled in chunks while others decode already. A last row serves from packed 8-bit caches. The
exit code says whether every configuration gave the tokens of transformers' own `generate`, which for packed caches
rounds its own alike. With `--mtp` the checkpoint's MTP block drafts tokens.

    python examples/serve_checkpoint.py --tokens 8 --runner mrv1
    python examples/serve_checkpoint.py --model path/to/DeepSeek-V4 --device cuda
    python examples/serve_checkpoint.py --kv-cache-dtype fp8_ds_mla --index-cache-dtype mxfp4
    python examples/serve_checkpoint.py --region narrow --trace step.json    # then open it in ui.perfetto.dev
    python examples/serve_checkpoint.py --mtp 2
    torchrun --nproc-per-node 2 examples/serve_checkpoint.py                 # experts sharded over two processes
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _processes import after_the_first, num_processes, one_of_many
from _rounding import rounded_caches
from _serving import (
    Served,
    load_tokenizer,
    reference,
    serve_batch,
    small_checkpoint,
    small_checkpoint_folder,
    stop_tokens,
    summarise_plan,
    trace_decode_step,
)
from safetensors import SafetensorError
from transformers.utils import logging

import dsv4_compile
from dsv4_compile.errors import Dsv4Error, InvalidRequestError
from dsv4_compile.inspect.arguments import OneLineParser
from dsv4_compile.inspect.plan import Plan
from dsv4_compile.integrations.transformers import SwappedModel, load_original, swap_attention
from dsv4_compile.log import pluralize
from dsv4_compile.models.deepseek_v4 import DeepseekV4Config
from dsv4_compile.models.deepseek_v4.cache_dtypes import INDEX_WORDS, KV_WORDS
from dsv4_compile.runners import ModelInputs, ModelRunner, ModelRunnerV1, ModelRunnerV2

RUNNERS: dict[str, type[ModelRunner]] = {"mrv1": ModelRunnerV1, "mrv2": ModelRunnerV2}
CONFIGURATIONS = (("mrv1", "wide"), ("mrv1", "minimal"), ("mrv2", "narrow"))
REGIONS = ("wide", "minimal", "narrow")
# In bfloat16 the order of a sum, which depends on the batch, can change which token is the likeliest.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "checkpoint": None}
AS_THE_MODEL = ("auto", "auto")  # formats of keys and values, and of the indexer's keys
PACKED = ("fp8_ds_mla", "fp8")
CHUNK = 64  # tokens of a step at most
BATCH_SIZES = (2, 4, 16, 64)  # what steps are padded to; each is captured
PROMPTS = (
    "Hi",
    "A block table says where a request keeps its keys.",
    "The earth is round. " * 8,
    "0123456789" * 30,
    "?",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: a configuration, what it served from caches of which formats, and for a compiled one its
    plans and set-up time."""

    name: str
    served: Served
    formats: tuple[str, str]
    plan: Plan | None = None
    drafter_plan: Plan | None = None
    capture_s: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 0 if all tokens are equal, 1 if not, 2 if it could not run."""
    options = parse_options(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with one_of_many(options.device):
            return run(options)
    except (Dsv4Error, OSError) as error:
        complaint = str(error).partition("\n\n")[0]  # Dynamo adds a paragraph to what passes through it
    except ImportError as error:
        complaint = f"transformers needs a library that is not installed: {error}"
    except (SafetensorError, json.JSONDecodeError) as error:
        made = small_checkpoint_folder(options.layers, mtp=bool(options.mtp))
        cure = "copy it again" if options.model else f"remove {made}, it is made anew"
        complaint = f"{error}; a file of the checkpoint is damaged or incomplete, {cure}"
    print(f"error: {options.model or 'small checkpoint'}: {' '.join(complaint.split())}", file=sys.stderr)
    return 2


def run(options: argparse.Namespace) -> int:
    """Load, serve in every configuration, compare, print."""
    if not options.model:
        torch.set_num_threads(1)  # its tensors are so small that threads only wait for each other
    # transformers saves nothing in other processes than the first
    folder = options.model or after_the_first(lambda: small_checkpoint(options.layers, mtp=bool(options.mtp)))
    sharded = num_processes() > 1
    original = load(folder, options.device, DTYPES[options.dtype], mtp=bool(options.mtp), sharded=sharded)
    tokenizer = load_tokenizer(folder)
    texts = options.prompt or PROMPTS
    prompts = [tokenizer.encode(text) for text in texts]
    formats = (options.kv_cache_dtype, options.index_cache_dtype)
    serving = Serving(original, prompts, options.tokens, formats, options.mtp)
    layers = pluralize(original.config.num_hidden_layers, "layer")
    where = f"{options.device}, {num_processes()} processes" if sharded else str(options.device)
    print(f"checkpoint {folder}: {layers}, {original.dtype}, {where}", flush=True)
    rows = [serving.eager()]
    configurations = chosen(options.runner, options.region)
    for runner, region in configurations:
        sizes = ", ".join(map(str, BATCH_SIZES))
        print(f"{runner} {region}: planning, compiling, capturing batches of {sizes} tokens", flush=True)
        is_last = (runner, region) == configurations[-1]
        rows.append(serving.compiled(runner, region, trace=options.trace if is_last else None))
    traced = rows[-1].name
    if formats == AS_THE_MODEL and not (options.runner or options.region):
        print(f"mrv2 narrow once more, with {' and '.join(PACKED)} caches", flush=True)
        rows.append(
            Serving(original, prompts, options.tokens, PACKED, options.mtp).compiled("mrv2", "narrow", trace=None)
        )
    # a model as large as to need several processes has to be its own reference
    whole = load(folder, options.device, DTYPES[options.dtype]) if sharded and not options.model else original
    expected = {
        formats: rounded_reference(whole, prompts, options.tokens, formats)
        for formats in dict.fromkeys(row.formats for row in rows)
    }
    print()
    print_answers(texts, rows[0].served, tokenizer)
    print_plans(rows)
    print_table(rows)
    if options.mtp:
        print_drafts(rows)
    if options.trace:
        print(f"\ntrace of one decode step of {traced}: {options.trace} (open it in https://ui.perfetto.dev)")
    return print_verdict(rows, expected, original.dtype)


def load(
    folder: Path, device: torch.device, dtype: torch.dtype | None, *, mtp: bool = False, sharded: bool = False
) -> Any:
    """The model as transformers loads it, with experts that are captured; no dtype: the checkpoint's own."""
    tp_plan = "auto" if sharded else None
    original: Any = load_original(folder, device=device, dtype=dtype, mtp=mtp, tp_plan=tp_plan).eval()
    if device.type == "cpu" or original.dtype != torch.bfloat16:
        # transformers' grouped experts read the routing back to the host there, which is eager
        original.set_experts_implementation("batched_mm")
    return original


class Serving:
    """A model with our attention and the requests it is to serve, again and again under other configurations.

    Compiled configurations draft so many tokens in a step as they are told to.
    """

    def __init__(
        self,
        original: Any,
        prompts: Sequence[list[int]],
        num_tokens: int,
        formats: tuple[str, str],
        num_drafts: int = 0,
    ) -> None:
        self._formats = formats
        self._prompts, self._num_tokens, self._stop = prompts, num_tokens, stop_tokens(original)
        self._num_drafts = num_drafts
        longest, limit = max(map(len, prompts)), original.config.max_position_embeddings
        self._longest = longest + num_tokens
        if self._longest > limit:
            raise InvalidRequestError(
                f"a prompt of {longest} tokens and {num_tokens} new ones do not fit in the {limit} positions of the "
                "checkpoint; shorten the prompt or ask for fewer --tokens"
            )
        self._model: SwappedModel = swap_attention(
            original,
            max_position_embeddings=self._longest,
            max_num_batched_tokens=CHUNK,
            kv_cache_dtype=formats[0],
            index_cache_dtype=formats[1],
        )

    def eager(self) -> Row:
        """Our attention without a compiler."""
        runner = self._runner("mrv1", self._model)
        with torch.no_grad():
            for size in BATCH_SIZES:  # the first calls of kernels cost more; captures pay for them too
                self._model(*arguments_of(runner.padding_inputs(size)))
        return Row(name="eager", served=self._serve(runner), formats=self._formats)

    def compiled(self, runner_name: str, region: str, trace: Path | None) -> Row:
        """Compiled for one kind of runner, with its eager holes placed by one policy; a trace follows if asked for."""
        torch.compiler.reset()  # frees what the last configuration captured
        options: dict[str, Any] = {"runner": runner_name, "region": region, "max_tokens": CHUNK}
        if self._num_drafts:
            options["pool"] = dsv4_compile.MemoryPool()  # the model and its drafter run in turns
        compiled, drafter = (
            None if module is None else torch.compile(module, backend="dsv4_piecewise", dynamic=True, options=options)
            for module in (self._model, self._model.drafter)
        )
        runner = self._runner(runner_name, compiled, drafter)
        plan, drafter_plan = self._explain(runner, options)
        start = time.perf_counter()
        dsv4_compile.capture(runner.run_padding, lambda size: (size,), BATCH_SIZES, group=self._model.process_group)
        seconds = time.perf_counter() - start
        served = self._serve(runner)
        if trace:
            trace_decode_step(runner, self._prompts, trace)
        name = f"{runner_name} {region}" + (" fp8" if self._formats == PACKED else "")
        return Row(
            name=name,
            served=served,
            formats=self._formats,
            plan=plan,
            drafter_plan=drafter_plan,
            capture_s=seconds,
        )

    def _explain(self, runner: ModelRunner, options: dict[str, Any]) -> tuple[Plan, Plan | None]:
        arguments = arguments_of(runner.padding_inputs(CHUNK))
        plan = dsv4_compile.explain(self._model, *arguments, options=options)
        if self._model.drafter is None:
            return plan, None
        with torch.no_grad():
            _, streams = self._model(*arguments)
        return plan, dsv4_compile.explain(self._model.drafter, *arguments, streams, options=options)

    def _runner(self, name: str, model: Any, drafter: Any = None) -> ModelRunner:
        return RUNNERS[name](
            model,
            self._model.config,
            max_num_reqs=4,
            max_num_batched_tokens=CHUNK,
            max_model_len=self._longest,
            buckets=BATCH_SIZES,
            attention=self._model,
            drafter=drafter,
            num_draft_tokens=0 if drafter is None else self._num_drafts,
        )

    def _serve(self, runner: ModelRunner) -> Served:
        return serve_batch(runner, self._prompts, self._num_tokens, self._stop)


def rounded_reference(
    original: Any, prompts: Sequence[list[int]], num_tokens: int, formats: tuple[str, str]
) -> list[list[int]]:
    """What transformers answers if its caches hold the numbers that caches of these formats hold."""
    config = DeepseekV4Config.from_hf(original.config).with_cache_dtypes(*formats)
    with rounded_caches(str(config.kv_cache_dtype), str(config.index_cache_dtype), config.qk_rope_head_dim):
        return [reference(original, prompt, num_tokens) for prompt in prompts]


def arguments_of(inputs: ModelInputs) -> tuple[Any, ...]:
    """What the model is called with."""
    return inputs.input_ids, inputs.positions, inputs.step


def print_answers(texts: Sequence[str], served: Served, tokenizer: Any) -> None:
    """What was generated, in the order of the prompts."""
    for text, answer in zip(texts, served.answers, strict=True):
        shown = repr(text) if len(text) <= 20 else f"{text[:17]!r}... ({len(text)})"
        print(f"{shown:>34} -> {tokenizer.decode(answer)}")


def print_plans(rows: Sequence[Row]) -> None:
    """What the compiler did, a few lines for each configuration."""
    for row in rows:
        if row.plan is not None:
            print("\n" + "\n".join(summarise_plan(row.name, row.plan)))
        if row.drafter_plan is not None:
            print("\n".join(summarise_plan(f"{row.name}, drafter", row.drafter_plan)))


def print_table(rows: Sequence[Row]) -> None:
    """One line for each configuration; what a configuration has not is a dash."""
    columns = ("first token", "decode step", "replays", "eager ops", "capture", "workspace")
    units = ("ms", "ms", "of calls", "a step", "s", "bytes")
    print()
    for name, cells in (("", columns), ("", units), *((row.name, cells_of(row)) for row in rows)):
        print(f"{name:<16}" + "".join(f"{cell:>13}" for cell in cells))


def cells_of(row: Row) -> tuple[str, ...]:
    """The cells of a row under the columns of the table."""
    served = row.served
    decode = "-" if served.decode_step_s is None else f"{served.decode_step_s * 1e3:.1f}"
    times = (f"{served.first_token_s * 1e3:.1f}", decode)
    if row.plan is None:
        return (*times, "-", "all", "-", "-")
    replays = f"{served.replays} of {served.num_calls}"
    eager_ops = f"{served.eager_ops / served.num_steps:.0f}"
    return (*times, replays, eager_ops, f"{row.capture_s:.1f}", str(row.plan.workspace.planned))


def print_drafts(rows: Sequence[Row]) -> None:
    """How many drafts stayed, and how many steps that saved beside the first row, which drafts nothing."""
    print()
    without = rows[0].served.num_steps
    for row in rows[1:]:
        drafts, steps = row.served.drafts, row.served.num_steps
        places = " + ".join(map(str, drafts.accepted_by_place))
        print(
            f"{row.name}: {drafts.accepted} of {drafts.drafted} drafts accepted ({places}), "
            f"{steps} steps instead of {without}: {without - steps} saved"
        )


def print_verdict(rows: Sequence[Row], expected: Mapping[tuple[str, str], list[list[int]]], dtype: torch.dtype) -> int:
    """Say whether every configuration gave the tokens of transformers, and return the exit code."""
    print()
    differing = [row for row in rows if row.served.answers != expected[row.formats]]
    for row in differing:
        right = expected[row.formats]
        wrong = sum(answer != other for answer, other in zip(row.served.answers, right, strict=True))
        print(f"{row.name}: tokens DIFFER from {generated(row.formats)} in {wrong} of {len(right)} requests")
    if differing and dtype != torch.float32:
        print(f"In {dtype}, sums in another order round to other tokens; --dtype float32 tells this from a fault")
    if not differing:
        for formats, right in expected.items():
            names = ", ".join(row.name for row in rows if row.formats == formats)
            print(f"{names}: the same tokens as {generated(formats)} ({len(right)} requests)")
    return 1 if differing else 0


def generated(formats: tuple[str, str]) -> str:
    """What tokens are compared with, in words."""
    if formats == AS_THE_MODEL:
        return "transformers' own generate"
    return f"transformers' own generate with caches rounded to {' and '.join(formats)}"


def chosen(runner: str | None, region: str | None) -> list[tuple[str, str]]:
    """The configurations to run: both given name one, one of them picks those of the default list."""
    if runner and region:
        return [(runner, region)]
    return [(one, where) for one, where in CONFIGURATIONS if runner in (None, one) and region in (None, where)]


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong value ends the program with one line."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: a small random one, made once")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated; default: five of our own")
    parser.add_argument("--tokens", type=positive, default=16, help="new tokens a request (default 16)")
    parser.add_argument("--layers", type=positive, help="layers of the small random checkpoint (default 4)")
    parser.add_argument(
        "--mtp", type=int, choices=(1, 2), default=0, help="draft so many tokens a step with the MTP block"
    )
    parser.add_argument("--runner", choices=RUNNERS, help="only this one; default both")
    parser.add_argument("--region", choices=REGIONS, help="only this one; with --runner, any pair")
    parser.add_argument("--device", type=device, default="cpu", help='"cpu" (default), "cuda" or "cuda:1"')
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default float32)")
    parser.add_argument(
        "--kv-cache-dtype", choices=KV_WORDS, default="auto", help="of keys and values (default auto: of the weights)"
    )
    parser.add_argument(
        "--index-cache-dtype", choices=INDEX_WORDS, default="auto", help="of the indexer's keys (default auto)"
    )
    parser.add_argument(
        "--trace", type=writable, metavar="FILE", help="write a Chrome trace of a decode step of the last configuration"
    )
    options = parser.parse_args(arguments)
    if options.trace and options.tokens < 2:
        parser.error("--trace shows a decode step, which needs --tokens of at least 2: the prompt gives the first")
    if options.model and options.layers:
        parser.error("--layers is for the small random checkpoint; it can't go with --model")
    options.layers = options.layers or 4
    return options


def positive(text: str) -> int:
    """An int of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def writable(text: str) -> Path:
    """A file that can be written; what it holds is kept until then."""
    path = Path(text).resolve()
    try:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from error
    return Path(text)


def device(text: str) -> torch.device:
    """A CPU, or a CUDA device that is there."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise argparse.ArgumentTypeError(f'{text!r} is not "cpu", "cuda" or "cuda:1"')
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return torch.device(text)


if __name__ == "__main__":
    sys.exit(main())
