"""Tiny random checkpoints for vLLM, and one process for each case that serves them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repository import ROOT

SIZES = [1, 2, 4, 8, 16, 32, 64]
ASKED = {"additional_config": {"dsv4_compile": {"capture_sizes": SIZES}}}
COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 64}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}


def make_model(kind: str, folder: Path) -> Path:
    """Write a checkpoint: "dense" is a Llama, "moe" a Qwen3 with experts; the same weights each time."""
    import torch
    import transformers

    names = {"dense": "Llama", "moe": "Qwen3Moe"}
    own: dict[str, Any] = {"dense": {}, "moe": {**EXPERTS, "num_experts": 8, "norm_topk_prob": True}}[kind]
    config = getattr(transformers, f"{names[kind]}Config")(**COMMON, **GROUPED, **own)
    torch.manual_seed(0)
    getattr(transformers, f"{names[kind]}ForCausalLM")(config).to(torch.bfloat16).eval().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Served:
    """What came of a process.

    Attributes:
        rounds: tokens of each prompt, twice.
        ready: what the counters were before the first prompt.
        served: what they grew by in the second round.
        mode: of compilation, that vLLM ended up with.
    """

    rounds: list[list[list[int]]]
    ready: dict[str, int]
    served: dict[str, int]
    mode: int


def run(folder: Path, arguments: dict[str, Any], **environment: str) -> subprocess.CompletedProcess[str]:
    """Serve in a process of its own."""
    script = ROOT / "tests" / "support" / "vllm_serving.py"
    command = [sys.executable, str(script), str(folder), json.dumps(arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=env)


def serve(folder: Path, arguments: dict[str, Any], **environment: str) -> Served:
    """Serve in a process of its own, which must come to its end."""
    done = run(folder, arguments, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return Served(**json.loads(done.stdout.strip().splitlines()[-1]))
