"""Padding and capture ahead where vLLM leaves both out: in modes 1 and 2, and on a CPU.

Where vLLM's own graphs are on, it pads the inputs of a batch to the next of its capture sizes, and runs each size twice
before it serves: that is our warm-up and our capture. Elsewhere each length would be a bucket of its own, captured
while requests wait. So, if the options name capture sizes, both are done here: the decision of how far a batch is
padded is wrapped in either model runner, and the warm-up of a worker.

Both are private to vLLM, which is why a release of vLLM is only allowed once its tests have passed (`.[vllm]`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from .options import VllmOptions, read_options
from .wrapping import wrap

Config: TypeAlias = Any  # vLLM's own configuration, whose types are those of vLLM


def pad_batches(config: Config, options: VllmOptions) -> None:
    """Wrap vLLM's decisions, if this configuration needs it; each looks at the configuration that it is made for."""
    from vllm.platforms import current_platform
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    if not sizes_of(config, options):
        return
    wrap(CudagraphDispatcher, "dispatch", _padded_dispatch)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    else:
        from vllm.v1.worker.gpu_worker import Worker
    wrap(Worker, "compile_or_warm_up_model", _capturing_ahead)
    if config.use_v2_model_runner:
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        wrap(CudaGraphManager, "dispatch", _padded_dispatch)


def sizes_of(config: Config, options: VllmOptions | None) -> Sequence[int]:
    """The sizes to pad to, smallest first; none where vLLM pads, or nobody asks for it."""
    if options is None or config.compilation_config.cudagraph_mode.name != "NONE":
        return ()
    given = options.backend.get("capture_sizes")
    return sorted(given) if isinstance(given, Sequence) else ()


def padded_size(num_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds a batch; the batch itself if none does, or there is nothing to pad."""
    return next((size for size in sizes if size >= num_tokens > 0), num_tokens)


def _padded_dispatch(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def padded(self: Any, *args: Any, **kwargs: Any) -> Any:
        decided = dispatch(self, *args, **kwargs)
        options = read_options(self.vllm_config.additional_config)
        sizes = sizes_of(self.vllm_config, options) if options is not None and options.pad else ()
        if not isinstance(decided, tuple):  # the new model runner decides on a batch, the old one on a mode too
            return _padded_batch(decided, sizes)
        mode, batch = decided
        return mode, _padded_batch(batch, sizes)

    return padded


def _padded_batch(batch: Any, sizes: Sequence[int]) -> Any:
    size = padded_size(batch.num_tokens, sizes)
    return batch if size == batch.num_tokens else replace(batch, num_tokens=size)


def _capturing_ahead(warm_up: Callable[..., Any]) -> Callable[..., Any]:
    def warm_up_and_capture(self: Any) -> Any:
        times = warm_up(self)
        for size in reversed(sizes_of(self.vllm_config, read_options(self.vllm_config.additional_config))):
            for _ in ("warm-up", "capture"):
                self.model_runner._dummy_run(size, skip_eplb=True, remove_lora=False)
        return times

    return warm_up_and_capture
