"""What the page on serving says of the memory of a rank is what the configurations give."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from released_configs import RELEASED
from repository import ROOT
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

PRO = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_lora_rank": 1024,
    "o_groups": 16,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
CONFIGS = {"Flash": {"compress_ratios": RELEASED["compress_ratios"]}, "Pro": PRO}  # Flash: transformers' defaults
PARTS = {"experts": r"\.mlp\.experts\.", "ends": r"embed_tokens|lm_head", "attention": r"\.self_attn\.", "rest": ""}


def parameters_of(name: str) -> Counter[str]:
    """How many parameters each part has, in 10^9."""
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(DeepseekV4Config(**CONFIGS[name]))
    counts: Counter[str] = Counter()
    for path, parameter in model.named_parameters():
        counts[next(part for part, pattern in PARTS.items() if re.search(pattern, path))] += parameter.numel()
    return counts


def rows_of(name: str) -> list[str]:
    page = (ROOT / "docs" / "serving.md").read_text()
    return re.findall(rf"^\| {name}\b.*$", page, re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGS)
def test_memory_of_a_rank(name: str) -> None:
    counts = parameters_of(name)
    experts, ends, attention, rest = (counts[part] * 1e-9 for part in PARTS)
    parameters, *ranks = rows_of(name)
    whole = 2 * (attention + rest)
    assert parameters == (
        f"| {name} | {counts.total() * 1e-9:.1f}e9 | {experts:.1f}e9 x 2 = {2 * experts:.1f} "
        f"| {ends:.2f}e9 x 2 = {2 * ends:.1f} | {attention:.2f}e9 x 2 = {2 * attention:.1f} "
        f"| {rest:.2f}e9 x 2 = {2 * rest:.1f} |"
    )
    assert len(ranks) == 2
    for row in ranks:
        (number,) = map(int, re.findall(r", (\d+) ranks", row))
        # of the figures as printed, so that a reader comes to the same
        total = (round(2 * experts, 1) + round(2 * ends, 1)) / number + round(whole, 1)
        told = f"({2 * experts:.1f} + {2 * ends:.1f}) / {number} + {whole:.1f} = {total:.1f}"
        assert row.startswith(f"| {name}, {number} ranks | {told} | ")
        for has, size, left in re.findall(r"(not in|in) (\d+) GB(?: with (\d+) left)?", row):
            assert (total > int(size)) == (has == "not in")
            assert not left or int(left) == round(int(size) - total)


def test_the_plan_of_transformers_shards_what_the_page_says() -> None:
    plan = {**DeepseekV4Config.base_model_tp_plan, **DeepseekV4ForCausalLM._tp_plan}
    assert all(re.search(r"\.mlp\.experts|embed_tokens|lm_head", rule) for rule in plan)
