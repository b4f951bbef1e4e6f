"""What this integration does not serve, said before a model is loaded; each answer is None or one sentence.

vLLM switches compilation off in several places without an error. Whoever has asked for this backend would then believe
that it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ...errors import UnsupportedConfigError

Config: TypeAlias = Any  # vLLM's own configuration, whose types are those of vLLM


def refuse_unsupported(config: Config, *, is_cpu: bool) -> None:
    """Refuse what would not be compiled, or has not been tried.

    Args:
        config: a `VllmConfig` that is complete.
        is_cpu: vLLM's platform is the CPU.

    Raises:
        UnsupportedConfigError: says what, and what to set.
    """
    for check in _CHECKS:
        if (reason := check(config)) is not None:
            raise UnsupportedConfigError(f"dsv4_compile in vLLM: {reason}")
    if (reason := why_not_compiled(config, is_cpu=is_cpu)) is not None:
        raise UnsupportedConfigError(f"dsv4_compile in vLLM: nothing would be compiled, since {reason}")


def why_not_compiled(config: Config, *, is_cpu: bool) -> str | None:
    """Which mode of vLLM keeps the backend from being called at all."""
    mode = int(config.compilation_config.mode or 0)
    if mode == 0 and getattr(config.model_config, "enforce_eager", False):
        return "enforce_eager is set: leave it out"
    if mode == 0:
        return (
            "vLLM has chosen compilation mode 0. It does so for models with graphs of its own that break "
            "(VLLM_USE_BREAKABLE_CUDAGRAPH=0 switches these off), and where -cc asks for mode 0; set mode 3"
        )
    if mode == 1 and is_cpu and not config.use_v2_model_runner:
        return "vLLM's old model runner for CPUs compiles nothing in mode 1: set mode 2 or 3"
    return None


def _why_no_lora(config: Config) -> str | None:
    return None if config.lora_config is None else "LoRA is not served: its adapters have not been tried; leave it out"


def _why_no_pipeline(config: Config) -> str | None:
    size = config.parallel_config.pipeline_parallel_size
    return None if size == 1 else f"pipeline_parallel_size={size} is not served: use tensor_parallel_size"


def _why_no_data_parallel(config: Config) -> str | None:
    size = config.parallel_config.data_parallel_size
    return None if size == 1 else f"data_parallel_size={size} is not served: start one server for each replica"


def _why_no_sleep(config: Config) -> str | None:
    if not getattr(config.model_config, "enable_sleep_mode", False):
        return None
    return "sleep mode is not served: captured graphs would replay into memory that is given back; leave it out"


_CHECKS: tuple[Callable[[Config], str | None], ...] = (
    _why_no_lora,
    _why_no_pipeline,
    _why_no_data_parallel,
    _why_no_sleep,
)
