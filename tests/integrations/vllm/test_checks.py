"""What is not served inside of vLLM is refused with a sentence, and so is a mode in which nothing would be compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsv4_compile.errors import UnsupportedConfigError
from dsv4_compile.integrations.vllm.checks import refuse_unsupported
from dsv4_compile.integrations.vllm.vllm_backend import runner_of


def config(mode: int = 3, *, v2: bool = False, eager: bool = False, sleep: bool = False, lora=None, **sizes: int):
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, **sizes}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode),
        model_config=SimpleNamespace(enforce_eager=eager, enable_sleep_mode=sleep),
        parallel_config=SimpleNamespace(**parallel),
        lora_config=lora,
        use_v2_model_runner=v2,
    )


@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_what_is_compiled_is_served(mode: int, is_cpu: bool) -> None:
    refuse_unsupported(config(mode), is_cpu=is_cpu)
    refuse_unsupported(config(1, v2=True), is_cpu=is_cpu)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(0), "vLLM has chosen compilation mode 0.*VLLM_USE_BREAKABLE_CUDAGRAPH=0"),
        (config(0, eager=True), "enforce_eager is set"),
        (config(1), "old model runner for CPUs compiles nothing in mode 1: set mode 2 or 3"),
        (config(lora=object()), "LoRA is not served"),
        (config(pipeline_parallel_size=2), "pipeline_parallel_size=2 is not served"),
        (config(data_parallel_size=2), "data_parallel_size=2 is not served"),
        (config(sleep=True), "sleep mode is not served"),
    ],
)
def test_what_is_not_is_refused(given: object, message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        refuse_unsupported(given, is_cpu=True)


def test_only_on_a_gpu_does_the_new_runner_keep_its_metadata_in_place() -> None:
    assert runner_of(config(v2=True), is_cpu=False) == "mrv2"
    assert runner_of(config(v2=True), is_cpu=True) == "mrv1"
    assert runner_of(config(v2=False), is_cpu=False) == "mrv1"
