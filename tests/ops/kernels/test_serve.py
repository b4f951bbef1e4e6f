"""Who serves an op on a GPU: calls of the function that is registered there, on CPU tensors and without Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from kernel_tools import HAS_TRITON, make_call
from op_samples import VARIANTS, op, sample

from dsv4_compile import counters
from dsv4_compile.ops.kernels import scratch, serve, table
from dsv4_compile.ops.kernels.launch import KernelLaunch


@pytest.fixture(autouse=True)
def nothing_said():
    serve.say_once.cache_clear()


class Recorder:
    """A kernel that only notes what it is launched with."""

    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))


@dataclass
class FakeCall:
    x: torch.Tensor
    reason: str | None
    kernel: Recorder

    def why_not(self):
        return self.reason

    def launches(self, architecture=None):
        for rows in (1, 2):
            yield KernelLaunch(kernel=self.kernel, grid=(rows,), arguments=(self.x,), constants={"ROWS": rows}, warps=2)


def on_gpu(monkeypatch, reason):
    kernel, served = Recorder(), []
    monkeypatch.setattr(serve, "find_kernels", lambda name: lambda x: FakeCall(x, reason, kernel))
    return serve.on_gpu("an_op", served.append), kernel, served


def test_a_kernel_that_fits_serves(monkeypatch):
    run, kernel, served = on_gpu(monkeypatch, None)
    x = torch.ones(3)
    with counters.expect(torch_op_calls=0):
        run(x)
    assert [(grid, constants) for grid, _, constants in kernel.launched] == [
        ((1,), {"ROWS": 1, "num_warps": 2, "num_stages": 1}),
        ((2,), {"ROWS": 2, "num_warps": 2, "num_stages": 1}),
    ]
    assert served == []


def test_without_tokens_nothing_is_launched(monkeypatch):
    run, kernel, served = on_gpu(monkeypatch, None)
    run(torch.ones(0))
    assert (kernel.launched, served) == ([], [])


def test_what_no_kernel_fits_goes_to_torch_counted_and_said_once(monkeypatch, caplog):
    run, kernel, served = on_gpu(monkeypatch, "x is too long")
    x = torch.ones(3)
    with counters.expect(torch_op_calls=2):
        run(x)
        run(x)
    assert served == [x, x]
    assert kernel.launched == []
    assert caplog.messages == ["dsv4::an_op runs in plain torch on the GPU: x is too long"]


def test_without_triton_torch_serves(monkeypatch, caplog):
    monkeypatch.setattr(serve, "find_kernels", lambda name: None)
    served = []
    with counters.expect(torch_op_calls=1):
        serve.on_gpu("an_op", served.append)(torch.ones(3))
    assert len(served) == 1
    assert serve.NO_TRITON in caplog.text


def python(code, **variables):
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


REGISTERED = (
    "import torch, dsv4_compile; has = torch._C._dispatch_has_kernel_for_dispatch_key;"
    "print([has('dsv4::inverse_rope', key) for key in ('CUDA', 'CompositeExplicitAutograd')])"
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("choice", "expected"), [("auto", "[True, True]"), ("torch", "[False, True]")])
def test_the_variable_chooses(choice, expected):
    result = python(REGISTERED, DSV4_OPS=choice)
    assert result.stdout.strip() == expected, result.stderr


def test_another_value_of_the_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("DSV4_OPS", "cuda")
    from dsv4_compile.errors import OptionError

    with pytest.raises(OptionError, match="the environment variable DSV4_OPS is 'cuda'; it must be auto or torch"):
        serve.read_choice()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: make test-kernels")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_call_takes_the_arguments_of_the_schema(name):
    expected = [argument.name for argument in op(name)._schema.arguments]
    call = make_call(name, sample(name, VARIANTS[name][0]))
    assert list(type(call).__dataclass_fields__) == expected


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_80"),
    ],
)
def test_the_nearest_architecture_has_no_more_shared_memory(capability, name):
    assert table.nearest(*capability) == name


@pytest.mark.parametrize(("programs", "tiles", "splits"), [(1, 20, 8), (1, 4, 2), (1, 3, 1), (64, 20, 2), (152, 99, 1)])
def test_splits_fill_the_device_and_leave_two_tiles_to_each(programs, tiles, splits):
    assert table.choose_splits(programs, tiles) == splits


def test_scratch_of_attention_is_enough_for_any_number_of_tokens():
    for tokens in range(1, 400):
        for heads in (1, 16, 64, 128):
            blocks = -(-heads // scratch.MOST_HEADS)
            splits = table.choose_splits(tokens * blocks, 1 << 20)
            if splits > 1:
                needed = scratch.partials_size(tokens, splits * heads, 512)
                assert needed <= scratch.partials_size(1, table.PROGRAMS * scratch.MOST_HEADS, 512)


def test_there_is_no_scratch_on_a_cpu():
    assert scratch.mqa_scratch(torch.ones(3, 2, 64)) is None
    assert scratch.indexer_scratch(torch.ones(3, 2, dtype=torch.int32)) is None
