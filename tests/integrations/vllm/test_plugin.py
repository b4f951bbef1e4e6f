"""The plugin, with stand-ins for vLLM: what it wraps, that it does nothing unless asked, how batches are padded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

import dsv4_compile
from dsv4_compile.errors import OptionError, UnsupportedConfigError
from dsv4_compile.integrations import vllm as integration
from dsv4_compile.integrations.vllm.padding import padded_size
from dsv4_compile.integrations.vllm.vllm_backend import VllmBackend

ASKED = {"dsv4_compile": {}}


class Graphs(Enum):
    NONE = 0
    PIECEWISE = 1


@dataclass
class Batch:
    num_tokens: int


def configuration(additional: object, *, mode: int = 3, graphs: Graphs = Graphs.NONE) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config=additional,
        compilation_config=SimpleNamespace(mode=mode, cudagraph_mode=graphs, cudagraph_capture_sizes=[1, 4]),
        model_config=SimpleNamespace(enforce_eager=False, enable_sleep_mode=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        lora_config=None,
        use_v2_model_runner=True,
    )


@dataclass
class FakeVllm:
    current: object = None
    modules: dict[str, ModuleType] = field(default_factory=dict)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """Modules with the names that the plugin imports; new classes for each test, since it wraps their methods."""
    fake = FakeVllm()

    class CompilationConfig:
        def init_backend(self, vllm_config, prefix: str = "", is_encoder: bool = False) -> str:
            return "vLLM's own"

    class EngineArgs:
        def __init__(self, config: SimpleNamespace) -> None:
            self.config, self.additional_config, self.created = config, config.additional_config, False

        def create_engine_config(self) -> SimpleNamespace:
            self.created = True
            return self.config

    class CudagraphDispatcher:
        def __init__(self, config: SimpleNamespace) -> None:
            self.vllm_config = config

        def dispatch(self, num_tokens: int) -> tuple[Graphs, Batch]:
            return Graphs.NONE, Batch(num_tokens)

    class CudaGraphManager(CudagraphDispatcher):
        def dispatch(self, num_tokens: int) -> Batch:
            return Batch(num_tokens)

    class CPUWorker:
        def __init__(self, config: SimpleNamespace) -> None:
            self.vllm_config, self.runs = config, []
            self.model_runner = SimpleNamespace(_dummy_run=lambda size, **_: self.runs.append(size))

        def compile_or_warm_up_model(self) -> str:
            return "times"

    names = {
        "vllm": {},
        "vllm.config": {
            "CompilationConfig": CompilationConfig,
            "get_current_vllm_config_or_none": lambda: fake.current,
        },
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1": {},
        "vllm.v1.cudagraph_dispatcher": {"CudagraphDispatcher": CudagraphDispatcher},
        "vllm.v1.worker": {},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
        "vllm.v1.worker.gpu": {},
        "vllm.v1.worker.gpu.cudagraph_utils": {"CudaGraphManager": CudaGraphManager},
    }
    for name, attributes in names.items():
        module = fake.modules[name] = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    integration.plugin()
    integration.plugin()
    return (yield fake)


def init(vllm: FakeVllm, config: SimpleNamespace, **given: object):
    return vllm.modules["vllm.config"].CompilationConfig().init_backend(config, **given)


def create(vllm: FakeVllm, config: SimpleNamespace):
    arguments = vllm.modules["vllm.engine.arg_utils"].EngineArgs(config)
    return arguments, arguments.create_engine_config


def test_nothing_happens_unless_it_is_asked_for(vllm: FakeVllm) -> None:
    config = configuration({})
    assert init(vllm, config) == "vLLM's own"
    _, make = create(vllm, replace_mode(config, 0))
    assert make().compilation_config.mode == 0


def replace_mode(config: SimpleNamespace, mode: int) -> SimpleNamespace:
    config.compilation_config.mode = mode
    return config


def test_the_backend_is_ours_where_it_is_asked_for(vllm: FakeVllm) -> None:
    backend = init(vllm, configuration({"dsv4_compile": {"region": "minimal"}}), prefix="backbone")
    assert isinstance(backend, VllmBackend)
    assert backend.options == {"runner": "mrv1", "capture_sizes": [1, 4], "region": "minimal"}


def test_encoders_are_left_to_vllm(vllm: FakeVllm) -> None:
    assert init(vllm, configuration(ASKED), is_encoder=True) == "vLLM's own"


def test_options_are_checked_before_there_is_a_configuration(vllm: FakeVllm) -> None:
    arguments, make = create(vllm, configuration({"dsv4_compile": {"regoin": "wide"}}))
    with pytest.raises(OptionError, match="did you mean 'region'"):
        make()
    assert not arguments.created


def test_a_mode_that_compiles_nothing_is_refused_before_a_model_loads(vllm: FakeVllm) -> None:
    _, make = create(vllm, configuration(ASKED, mode=0))
    with pytest.raises(UnsupportedConfigError, match="nothing would be compiled"):
        make()


def test_the_name_of_the_backend_is_looked_up_while_a_model_is_made(vllm: FakeVllm) -> None:
    vllm.current = configuration({})
    assert isinstance(integration.backend, VllmBackend)
    vllm.current = None
    with pytest.raises(UnsupportedConfigError, match="is made while vLLM makes a model"):
        _ = integration.backend
    with pytest.raises(AttributeError, match="no attribute 'backends'"):
        _ = integration.backends


def test_it_compiles_and_captures(vllm: FakeVllm) -> None:
    backend = init(vllm, configuration({"dsv4_compile": {"split_ops": ["toy::fresh"]}}))
    function = torch.compile(lambda x: torch.ops.toy.fresh(x + 1) * 2, backend=backend, dynamic=True)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 2)
            torch.testing.assert_close(function(x), torch.ops.toy.fresh(x + 1) * 2)
    assert dsv4_compile.counters.captures == 1


@pytest.mark.parametrize(
    ("options", "graphs", "padded", "runs"),
    [
        ({"capture_sizes": [2, 8]}, Graphs.NONE, 8, [8, 8, 2, 2]),
        ({"capture_sizes": [2, 8], "pad": False}, Graphs.NONE, 3, [8, 8, 2, 2]),
        ({"capture_sizes": [2, 8]}, Graphs.PIECEWISE, 3, []),
        ({}, Graphs.NONE, 3, []),
    ],
)
def test_batches_are_padded_and_captured_ahead_where_vllm_does_neither(
    vllm: FakeVllm, options: dict[str, object], graphs: Graphs, padded: int, runs: list[int]
) -> None:
    config = configuration({"dsv4_compile": options}, graphs=graphs)
    for _ in range(2):  # a second model must not wrap once more
        init(vllm, config)
    dispatcher = vllm.modules["vllm.v1.cudagraph_dispatcher"].CudagraphDispatcher(config)
    manager = vllm.modules["vllm.v1.worker.gpu.cudagraph_utils"].CudaGraphManager(config)
    worker = vllm.modules["vllm.v1.worker.cpu_worker"].CPUWorker(config)
    assert dispatcher.dispatch(3) == (Graphs.NONE, Batch(padded))
    assert manager.dispatch(3) == Batch(padded)
    assert worker.compile_or_warm_up_model() == "times"
    assert worker.runs == runs


@pytest.mark.parametrize(("tokens", "size"), [(0, 0), (1, 2), (2, 2), (3, 8), (8, 8), (9, 9)])
def test_the_next_size_holds_a_batch(tokens: int, size: int) -> None:
    assert padded_size(tokens, [2, 8]) == size
    assert replace(Batch(tokens), num_tokens=size) == Batch(size)
