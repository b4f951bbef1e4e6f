"""What compiles a graph that was traced for vLLM: `dsv4_piecewise`, with the options of one configuration of vLLM.

The runner is vLLM's own choice, made stricter where its promise does not hold: the new model runner keeps the metadata
of a step in persistent buffers on GPUs. On a CPU it does not, so nothing that reads it may be captured there.

vLLM compiles ahead of time where it can, and asks for a callable that can be written to disk. A captured graph cannot:
it says so when it is asked, vLLM logs that, and serves the one in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from torch import fx

from ...backend import dsv4_piecewise
from ...compat.ahead_of_time import in_memory
from ...graph.traced import Value
from .options import VllmOptions
from .roles import register_roles

Config: TypeAlias = Any  # vLLM's own configuration, whose types are those of vLLM


class VllmBackend:
    """A Dynamo backend for one configuration of vLLM.

    Args:
        config: a `VllmConfig`.
        options: what it asks of us.
        is_cpu: vLLM's platform is the CPU.

    Attributes:
        options: of `dsv4_piecewise`.
    """

    def __init__(self, config: Config, options: VllmOptions, *, is_cpu: bool) -> None:
        self._data_parallel = config.parallel_config.data_parallel_size > 1
        self.options = options.for_backend(
            runner=runner_of(config, is_cpu=is_cpu), capture_sizes=config.compilation_config.cudagraph_capture_sizes
        )

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Value], **_: object) -> Callable[..., object]:
        """Compile a graph, by which time its model has defined all ops that it calls."""
        register_roles(data_parallel=self._data_parallel)
        return in_memory(dsv4_piecewise(gm, example_inputs, options=self.options))


def runner_of(config: Config, *, is_cpu: bool) -> Literal["mrv1", "mrv2"]:
    """Which promise vLLM's model runner keeps."""
    return "mrv2" if config.use_v2_model_runner and not is_cpu else "mrv1"
