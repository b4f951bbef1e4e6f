"""Warm up a serving process: capture every batch size before the first request, then serve without a single capture.

The runner's own padding rows are the dummy batch: they write no cache, and they are what short batches are filled with.

    python examples/capture_buckets.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from _layer import MAX_TOKENS, make_runner

import dsv4_compile
from dsv4_compile.inspect.arguments import OneLineParser
from dsv4_compile.models.deepseek_v4 import AttentionStack, DeepseekV4Config

BUCKETS = (2, 8, MAX_TOKENS)
PROMPTS = ([1, 2, 3], list(range(60)), [5] * 20)


def main(arguments: Sequence[str] | None = None) -> None:
    """Capture, serve, and print the counters of both."""
    OneLineParser(description=__doc__).parse_args(arguments)
    stack = AttentionStack(DeepseekV4Config.tiny([0, 4, 128], max_num_batched_tokens=MAX_TOKENS))
    options: dict[str, Any] = {"runner": "mrv2", "max_tokens": MAX_TOKENS}  # one workspace, made for the largest
    compiled = torch.compile(stack, backend="dsv4_piecewise", dynamic=True, options=options)
    runner = make_runner(compiled, stack, BUCKETS)

    def inputs_for(num_tokens: int) -> tuple[Any, ...]:
        inputs = runner.padding_inputs(num_tokens)
        return inputs.input_ids, inputs.positions, inputs.step

    dsv4_compile.capture(compiled, inputs_for, BUCKETS)
    print(f"warmed up: {dsv4_compile.counters}")
    with dsv4_compile.counters.expect(graphs_compiled=0, captures=0, uncaptured_calls=0):
        answers = runner.generate(PROMPTS, max_new_tokens=5)
    print(f"served:    {dsv4_compile.counters}")
    expected = make_runner(stack, stack).generate(PROMPTS, max_new_tokens=5)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(f"prompt of {len(prompt)} tokens -> {answer}")
    print(f"{'equal to' if answers == expected else 'DIFFERENT from'} what the model answers without a compiler")


if __name__ == "__main__":
    main()
