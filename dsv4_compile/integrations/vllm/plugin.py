"""The entry point of group `vllm.general_plugins`; vLLM calls it in each of its processes, before there is a model.

Two functions of vLLM are wrapped, and nothing else happens unless the configuration asks for this backend:

| wrapped | what for |
|---|---|
| `EngineArgs.create_engine_config` | options and modes are checked in the first process, before a model loads |
| `CompilationConfig.init_backend` | the backend of a model is ours, in modes 1, 2 and 3 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ...errors import UnsupportedConfigError
from .checks import refuse_unsupported
from .options import KEY, VllmOptions, read_options
from .padding import pad_batches
from .vllm_backend import VllmBackend
from .wrapping import wrap

Config: TypeAlias = Any  # vLLM's own configuration, whose types are those of vLLM


def plugin() -> None:
    """Wrap what the table above names; a second call changes nothing."""
    from vllm.config import CompilationConfig
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "create_engine_config", _checked)
    wrap(CompilationConfig, "init_backend", _ours_if_asked)


def _checked(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        read_options(self.additional_config)  # first: what it says needs no model
        config = create(self, *args, **kwargs)
        if read_options(config.additional_config) is not None:
            refuse_unsupported(config, is_cpu=_is_cpu())
        return config

    return create_engine_config


def _ours_if_asked(init: Callable[..., Any]) -> Callable[..., Any]:
    def init_backend(self: Any, vllm_config: Config, *args: Any, **kwargs: Any) -> Any:
        options = read_options(vllm_config.additional_config)
        is_encoder = kwargs.get("is_encoder", len(args) > 1 and args[1])
        if options is None or is_encoder:  # an encoder of images has no layer that reads the step
            return init(self, vllm_config, *args, **kwargs)
        return make_backend(vllm_config, options)

    return init_backend


def make_backend(config: Config, options: VllmOptions) -> VllmBackend:
    """The backend of a model, and what pads its batches where vLLM does not."""
    pad_batches(config, options)
    return VllmBackend(config, options, is_cpu=_is_cpu())


def backend_of_current_config() -> VllmBackend:
    """That of the configuration with which vLLM makes a model just now.

    Raises:
        UnsupportedConfigError: it makes none.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        raise UnsupportedConfigError(
            "dsv4_compile.integrations.vllm.backend is made while vLLM makes a model, and none is being made: name it "
            f"in -cc, or ask for the plugin with --additional-config '{{\"{KEY}\": {{}}}}'"
        )
    return make_backend(config, read_options(config.additional_config) or VllmOptions())


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
