"""The host engine keeps every rule of capture, and a few that only it has."""

import subprocess
import sys

import pytest
import torch
from engine_examples import EXAMPLES
from engine_streams import EXAMPLES as STREAMS
from engine_surroundings import EXAMPLES as SURROUNDINGS

from dsv4_compile.errors import CaptureError, OptionError
from dsv4_compile.runtime.engines.capture_state import is_capturing
from dsv4_compile.runtime.engines.host.engine import HostEngine
from dsv4_compile.runtime.engines.host.pool import PoolBlock
from dsv4_compile.runtime.engines.select import engine_for

RULES = EXAMPLES | SURROUNDINGS | STREAMS
ENGINE = HostEngine()


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    RULES[name](ENGINE)


def capture(run, pool=None):
    return ENGINE.capture(run, pool or ENGINE.make_pool(), name="the example")


def read_reused_memory(engine):
    """What a tensor holds that was leased from memory in which a replay left its own value."""
    x, out, pool, kept = torch.ones(4), torch.zeros(4), engine.make_pool(), []
    first = engine.capture(lambda: out.copy_(x * 2 + 1), pool, name="the first")
    first.replay()
    second = engine.capture(lambda: kept.append(x * 2) or out.copy_(x), pool, name="the second")
    return kept[0], first, second


def test_memory_is_poisoned_before_it_is_used_again():
    reused, *_ = read_reused_memory(ENGINE)
    assert reused.isnan().all()


def test_without_poison_reused_memory_looks_right(monkeypatch):
    monkeypatch.setattr(PoolBlock, "poison", lambda block: None)
    reused, *_ = read_reused_memory(ENGINE)
    assert not reused.isnan().any()


def test_pool_memory_lives_as_long_as_recordings_use_it():
    x, out, pool = torch.ones(64), torch.zeros(64), ENGINE.make_pool()
    run = lambda: out.copy_(x * 2 + 1)  # noqa: E731
    first, second = capture(run, pool), capture(run, pool)
    assert pool.nbytes == 256
    first.release()
    assert pool.nbytes == 256
    second.release()
    assert pool.nbytes == 0


def test_a_recording_that_is_dropped_frees_its_memory():
    x, out, pool = torch.ones(64), torch.zeros(64), ENGINE.make_pool()
    graph = capture(lambda: out.copy_(x * 2 + 1), pool)
    assert pool.nbytes > 0
    del graph
    assert pool.nbytes == 0


def test_memory_of_a_failed_capture_is_given_back_at_once():
    x, out, pool = torch.ones(64), torch.zeros(64), ENGINE.make_pool()

    def fail():
        out.copy_(x * 2 + 1)
        raise KeyError("of the user")

    with pytest.raises(KeyError) as caught:
        capture(fail, pool)
    assert pool.nbytes == 0
    del caught


def test_the_smallest_block_that_fits_is_taken():
    pool = ENGINE.make_pool()
    out, sizes = torch.zeros(4096), (4096, 64, 1024)
    graphs = [capture(lambda n=n: out[:n].copy_((out[:n] + 1) * 2 + 1), pool) for n in sizes]
    before = pool.nbytes
    graphs.append(capture(lambda: out[:1000].copy_((out[:1000] + 1) * 2 + 1), pool))
    assert (pool.nbytes, len(graphs)) == (before, 4)


def test_inputs_and_weights_are_kept_alive():
    inputs, out = [torch.ones(4)], torch.zeros(4)
    graph = capture(lambda: out.copy_(inputs[0] * 2))
    inputs.clear()
    torch.full((4,), 9.0)
    graph.replay()
    assert out.tolist() == [2, 2, 2, 2]


def test_a_constant_is_new_in_every_replay():
    out = torch.zeros(2)
    graph = capture(lambda: out.copy_(torch.tensor([1.0, 2.0]).add_(1)))
    for _ in range(2):
        graph.replay()
        assert out.tolist() == [2, 3]


FILLED = {
    "zeros": lambda x: torch.zeros(2, 3),
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.int32),
    "full": lambda x: torch.full((2, 3), True),
    "full_like": lambda x: torch.full_like(x, 2.7, dtype=torch.int64),
    "new_full": lambda x: x.new_full((3, 2), float("-inf")),
    "scalar_tensor": lambda x: torch.scalar_tensor(3, dtype=torch.bfloat16),
    "where": lambda x: torch.where(x > 0, x, -1),
    "complex": lambda x: torch.full((2,), 1 + 2j),
}


@pytest.mark.parametrize("name", FILLED)
def test_a_tensor_of_one_value_is_filled_in_every_replay(name):
    x = torch.tensor([[1.0, -2.0, 3.0], [0.0, 1.0, -1.0]])
    expected, kept = FILLED[name](x), []
    graph = capture(lambda: kept.append(FILLED[name](x)))
    for _ in range(2):
        kept[0].zero_()
        graph.replay()
        assert kept[0].dtype == expected.dtype
        assert torch.equal(kept[0], expected)


def test_an_empty_out_tensor_is_given_memory():
    x, out = torch.ones(4), torch.zeros(4)
    graph = capture(lambda: out.copy_(torch.add(x, 1, out=torch.empty(0)) * 2))
    graph.replay()
    assert out.tolist() == [4, 4, 4, 4]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # torch's own, and right
def test_an_out_tensor_of_the_wrong_size_is_refused():
    x, out = torch.ones(4), torch.empty(2)
    with pytest.raises(CaptureError, match=r"aten::add.out resizes a tensor from \[2\] to \[4\]"):
        capture(lambda: torch.add(x, 1, out=out))
    assert out.shape == (2,)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the opaque kernel used here is oneDNN's")
def test_an_opaque_kernel_is_one_launch():
    x, weight, out = torch.ones(2, 2), torch.eye(2), torch.zeros(2, 2)
    graph = capture(lambda: out.copy_(torch.ops.mkldnn._linear_pointwise(x, weight, None, "relu", [], "")))
    assert out.tolist() == [[0, 0], [0, 0]]
    weight.mul_(3)
    graph.replay()
    assert (out.tolist(), len(graph)) == ([[3, 3], [3, 3]], 1)


@pytest.mark.parametrize("size", [2, 4])
def test_results_in_a_list_are_all_copied(size):
    x, out = torch.arange(4.0), torch.zeros(4)
    graph = capture(lambda: out.copy_(torch.cat(torch.unsafe_split(x, size)) + 1))
    graph.replay()
    assert out.tolist() == [1, 2, 3, 4]


def test_results_that_nobody_wants_are_not_copied():
    x, out = torch.randn(3, 4).bfloat16(), torch.zeros(3, 4).bfloat16()
    graph = capture(lambda: out.copy_(torch.layer_norm(x, (4,))))
    graph.replay()
    assert (torch.equal(out, torch.layer_norm(x, (4,))), len(graph)) == (True, 1)


def test_a_fake_kernel_that_is_wrong_is_found_out():
    from dsv4_compile.runtime.engines.host.launch import _run_and_copy

    with pytest.raises(CaptureError, match=r"ns::op returned torch.float64 \[3\], but its fake .* torch.float32 \[2\]"):
        _run_and_copy("ns::op", lambda: (torch.zeros(3, dtype=torch.float64),), [torch.zeros(2)])


def refuse_sizes():
    torch.ones(2, 3).t_()
    OUTER.t_()


OUTER = torch.ones(2, 3)
REFUSED = {
    "aten::t_ changes sizes or strides of a tensor made outside": refuse_sizes,
    "works on cuda": lambda: torch.ops.aten._to_copy(OUTER, device=torch.device("cuda")),
    "layout torch.sparse_coo": lambda: SPARSE.abs(),
    "Tensor.numpy needs a device-to-host sync": lambda: OUTER.numpy(),
    "Tensor.__array__ needs a device-to-host sync": lambda: OUTER.__array__(),
    "Tensor.__float__ needs a device-to-host sync": lambda: float(OUTER[0, 0]),
    "torch.tensor copies elements out of tensors": lambda: torch.tensor([OUTER[0, 0], 1.0]),
    "Tensor.apply_ runs Python on every element": lambda: OUTER.apply_(abs),
    "moves a tensor": lambda: setattr(OUTER, "data", OUTER),
    "Tensor.__dlpack__ reads a value": lambda: OUTER.__dlpack__(),
    "Tensor.tensor_split reads a value": lambda: OUTER.tensor_split(torch.tensor([1]), 1),
    "aten::index_put_ indexes with a mask": lambda: OUTER.__setitem__(OUTER > 0, 1.0),
    "aten::repeat_interleave.Tensor returns a tensor whose size": lambda: torch.tensor([1, 2]).repeat_interleave(
        torch.tensor([1, 2])
    ),
    "is no plain tensor": lambda: WRAPPED + 1,
}
SPARSE = torch.eye(2).to_sparse()


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


WRAPPED = Wrapper(OUTER)


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_refusal(message, mode):
    with mode(), pytest.raises(CaptureError) as caught:
        capture(REFUSED[message])
    assert message.replace("aten::", "") in str(caught.value).replace("aten::", "")
    assert "while the example is recorded (" in str(caught.value)
    assert "test_engine.py" in str(caught.value)
    assert OUTER.shape == (2, 3)


def test_index_tensors_and_known_repeats_are_no_masks():
    x, out = torch.arange(3.0), torch.zeros(3)
    rows, counts = torch.tensor([2, 0]), torch.tensor([2, 1])
    graph = capture(lambda: out.copy_(x[rows].repeat_interleave(counts, output_size=3)))
    graph.replay()
    assert out.tolist() == [2, 2, 0]


def test_a_branch_on_the_device_is_refused():
    x = torch.ones(2)
    with pytest.raises(CaptureError, match="higher-order op cond decides on the host"):
        capture(lambda: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


def test_the_line_is_that_of_the_traced_function():
    graphs = []

    def record(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    def model(x):
        return x * x.sum().item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(model, backend=record, fullgraph=True, dynamic=False)(torch.ones(3))
    with pytest.raises(CaptureError, match=r"test_engine.py:\d+ in model: return x \* x.sum\(\).item\(\)"):
        capture(lambda: graphs[0](torch.ones(3)))


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("gpu", "cpu", "engine='gpu': it must be 'auto', 'cuda' or 'host'"),
        ("cuda", "cpu", "engine='cuda' cannot record the work of inputs on cpu: use engine='host' or 'auto'"),
        ("host", "cuda", "engine='host' cannot record the work of inputs on cuda: use engine='cuda' or 'auto'"),
        ("auto", "meta", "engine='auto' cannot record the work of inputs on meta: use engine='off'"),
    ],
)
def test_no_such_engine(name, device, message):
    with pytest.raises(OptionError, match=message):
        engine_for(name, torch.device(device))


def test_the_engine_of_a_device_is_shared():
    assert engine_for("auto", torch.device("cpu")) is engine_for("host", torch.device("cpu"))
    assert engine_for("auto", torch.device("cpu")).name == "host"


def test_asking_whether_a_graph_is_recorded_needs_no_dynamo():
    code = (
        "import sys; from dsv4_compile.runtime.engines.capture_state import is_capturing;"
        "print(is_capturing(), 'torch._dynamo' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
    assert not is_capturing()
