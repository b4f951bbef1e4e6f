"""Serve a checkpoint with our attention, and check every token against transformers' own `generate`.

Without `--model` it makes a small random checkpoint once, in a cache folder and in the standard format. The prompts
are plain bytes, so no tokenizer is needed; with random weights the answers mean nothing, but they must be the same.
Long prompts are prefilled in chunks while others decode already.

    python examples/serve_checkpoint.py --tokens 16 --runner mrv1
    python examples/serve_checkpoint.py --model path/to/DeepSeek-V4
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.utils import logging

from dsv4_compile.errors import Dsv4Error
from dsv4_compile.integrations.transformers import load_original, swap_attention
from dsv4_compile.runners import ModelRunner, ModelRunnerV1, ModelRunnerV2

RUNNERS: dict[str, type[ModelRunner]] = {"mrv1": ModelRunnerV1, "mrv2": ModelRunnerV2}
CHUNK = 64
RATIOS = (0, 4, 128)  # the three kinds of layer, in turn
PROMPTS = (
    "Hi",
    "A block table says where a request keeps its keys.",
    "The earth is round. " * 8,
    "0123456789" * 30,
    "?",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 0 if all tokens are equal, 1 if not, 2 if it could not run."""
    options = parse_options(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return serve(options.model or tiny_checkpoint(options.layers), options.tokens, RUNNERS[options.runner])
    except (Dsv4Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def serve(folder: Path, num_tokens: int, runner_type: type[ModelRunner]) -> int:
    """Answer the prompts with a runner and with transformers, and compare."""
    original = load_original(folder).eval()
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    longest = max(map(len, prompts)) + num_tokens
    positions = min(longest, original.config.max_position_embeddings)
    model = swap_attention(original, max_position_embeddings=positions, max_num_batched_tokens=CHUNK)
    print(f"checkpoint {folder}: {model.config.num_hidden_layers} layers, {original.dtype}")
    runner = runner_type(model, model.config, max_num_reqs=4, max_num_batched_tokens=CHUNK, max_model_len=longest)
    start = time.perf_counter()
    answers = runner.generate(prompts, num_tokens, stop_tokens=stop_tokens(original))
    seconds = time.perf_counter() - start
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"{shorten(prompt):>34} -> {' '.join(map(str, answer))}")
    print(f"{len(prompts)} requests, {sum(map(len, answers))} tokens in {seconds:.2f} s by {runner_type.__name__}")
    num_equal = sum(answer == reference(original, p, num_tokens) for p, answer in zip(prompts, answers, strict=True))
    if num_equal < len(prompts):
        print(f"tokens DIFFER from transformers' own generate in {len(prompts) - num_equal} of {len(prompts)} requests")
        return 1
    print(f"all tokens equal transformers' own generate ({num_equal} of {len(prompts)} requests)")
    return 0


def reference(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The same prompt, alone and unpaged, by transformers."""
    ids = torch.tensor([prompt])
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


def shorten(text: str) -> str:
    """Text that fits a column."""
    return repr(text) if len(text) <= 20 else f"{text[:17]!r}... ({len(text)})"


def tiny_checkpoint(num_layers: int) -> Path:
    """The folder of a small random checkpoint, made if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4_compile"
    folder = cache / f"tiny-{num_layers}-layers"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            random_model(num_layers).save_pretrained(Path(unfinished) / "checkpoint")
            (Path(unfinished) / "checkpoint").rename(folder)
    return folder


def random_model(num_layers: int) -> DeepseekV4ForCausalLM:
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
        o_groups=2,
        o_lora_rank=16,
        index_head_dim=16,
        index_topk=16,
        rope_parameters={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
    )
    model = DeepseekV4ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + name.endswith("norm.weight"))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # which experts a token goes to in the first layers
                buffer.random_(config.n_routed_experts, generator=generator)
    return model


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; a wrong value ends the program with one line."""
    parser = _Parser(description="Serve a checkpoint with our attention and compare with transformers.")
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: a small random one, made once")
    parser.add_argument("--tokens", type=positive, default=16, help="new tokens a request (default 16)")
    parser.add_argument("--layers", type=positive, help="layers of the small random checkpoint (default 4)")
    parser.add_argument("--runner", choices=RUNNERS, default="mrv2", help="default mrv2")
    options = parser.parse_args(arguments)
    if options.model and options.layers:
        parser.error("--layers is for the small random checkpoint; it can't go with --model")
    options.layers = options.layers or 4
    return options


def positive(text: str) -> int:
    """An int of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
