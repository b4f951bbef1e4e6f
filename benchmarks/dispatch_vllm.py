"""The toy under vLLM's compilation, run by `dispatch` with the Python of an environment that has vLLM.

    PYTHON -m benchmarks.dispatch_vllm LAYERS SECONDS

Prints one line of JSON: versions, seconds of an eager step, and of a step under the piecewise backend with Inductor.
vLLM turns that backend off on a CPU when its configuration is made, so it is asked for again afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor
from vllm.compilation.counter import compilation_counter  # type: ignore[import-not-found, unused-ignore]
from vllm.compilation.decorators import support_torch_compile  # type: ignore[import-not-found, unused-ignore]
from vllm.config import (  # type: ignore[import-not-found, unused-ignore]
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    PassConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context  # type: ignore[import-not-found, unused-ignore]

from .measure import measure
from .toy import SPLIT_OP, WIDTH, Toy


class CompiledToy(Toy):
    """The toy with the constructor that vLLM's decorator expects."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", layers: int) -> None:
        super().__init__(layers)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] to the same."""
        return super().forward(x)


def piecewise_config() -> Any:
    """A configuration for the piecewise backend, split at the toy's op."""
    chosen = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        splitting_ops=[SPLIT_OP],
        backend="inductor",
        cudagraph_mode=CUDAGraphMode.NONE,
        pass_config=PassConfig(fuse_rope_kvcache_cat_mla=False),  # that pass is not there on a CPU
    )
    config = VllmConfig(compilation_config=chosen)
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    config.compilation_config.compile_sizes = []
    return config


def main(layers: int, seconds: float) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    config, x = piecewise_config(), torch.randn(4, WIDTH)
    with set_current_vllm_config(config):
        model = support_torch_compile(dynamic_arg_dims={"x": 0})(CompiledToy)(vllm_config=config, layers=layers)
    eager = partial(Toy.forward, model, x)
    with torch.no_grad(), set_forward_context(None, config):
        for _ in range(3):
            torch.testing.assert_close(model(x), eager())
        pieces = compilation_counter.num_piecewise_capturable_graphs_seen
        assert pieces == layers + 1, f"{pieces} pieces: the piecewise backend did not run"
        medians = measure({"eager": eager, "vLLM piecewise, inductor": partial(model, x)}, seconds)
    found = {"version": vllm.__version__, "torch": torch.__version__, "eager": medians.pop("eager"), "seconds": medians}
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
