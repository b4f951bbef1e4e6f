"""The ops of this package on the host engine: what may be captured replays right, what may not is refused."""

import pytest
import torch
from op_samples import ALL, sample

from dsv4_compile.errors import CaptureError
from dsv4_compile.ops.registry import snapshot
from dsv4_compile.runtime.engines.host.engine import HostEngine

ENGINE = HostEngine()
ROLES = {name.removeprefix("dsv4::"): op.role for name, op in snapshot().items()}
CAPTURED = [(name, variant) for name, variant in ALL if ROLES[name] != "split"]
INDEXER = [
    (name, variant) for name, variant in ALL if name == "sparse_indexer"
]  # the other has no sync in every variant


def tensors(arguments):
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def capture(name, arguments):
    op = getattr(torch.ops.dsv4, name)
    return ENGINE.capture(lambda: op(**arguments), ENGINE.make_pool(), name=name)


@pytest.mark.parametrize(("name", "variant"), CAPTURED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_captured_op_replays_what_eager_code_does(name, variant, mode):
    arguments, eager = sample(name, variant), sample(name, variant)
    with mode():
        graph = capture(name, arguments)
        for key, value in tensors(sample(name, variant)).items():
            torch.testing.assert_close(arguments[key], value, rtol=0, atol=0, equal_nan=True)
        for _ in range(2):
            graph.replay()
            getattr(torch.ops.dsv4, name)(**eager)
    for key, value in tensors(eager).items():
        torch.testing.assert_close(arguments[key], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "variant"), INDEXER)
def test_the_indexer_is_refused_with_its_line(name, variant):
    with pytest.raises(CaptureError, match=rf"while {name} is recorded \(.*{name}.py:\d+ in "):
        capture(name, sample(name, variant))
