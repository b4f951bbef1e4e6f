"""The registry of roles: what may be registered, what is refused and how, and that a snapshot never changes."""

import threading
from dataclasses import replace

import pytest
import torch

from dsv4_compile import register_op
from dsv4_compile.compat.dispatch import schemas_of
from dsv4_compile.errors import ArgumentError, UnknownOpError
from dsv4_compile.ops import registry
from dsv4_compile.ops.registry import RegisteredOp, snapshot, with_split_ops

OURS = [
    RegisteredOp("dsv4::fused_q_kv_rmsnorm", "capture"),
    RegisteredOp("dsv4::qnorm_rope_kv_insert", "prepare", ("slot_mapping",)),
    RegisteredOp(
        "dsv4::compress_kv_insert",
        "prepare",
        ("token_to_req", "state_block_table", "state_slot_mapping", "slot_mapping"),
    ),
    RegisteredOp("dsv4::indexer_q_rope", "capture"),
    RegisteredOp("dsv4::sparse_indexer", "split", ("token_to_req", "block_table"), tokens="index_q"),
    RegisteredOp("dsv4::forward_mqa", "split", ("token_to_req", "swa_block_table", "block_table"), tokens="q"),
    RegisteredOp("dsv4::inverse_rope", "capture"),
]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_our_ops_are_registered_with_their_roles(op):
    assert replace(snapshot()[op.name], capturable="never") == op  # with Triton the split ops promise


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_our_ops_name_arguments_that_they_have(op):
    (schema,) = schemas_of(op.name)
    have = {argument.name for argument in schema.arguments}
    assert {*op.step_state, *filter(None, [op.tokens])} <= have
    assert not schema.returns


@pytest.mark.parametrize("role", ["split", "prepare", "capture"])
def test_an_op_gets_a_role(role):
    register_op("aten::mm", role=role)
    assert snapshot()["aten::mm"] == RegisteredOp("aten::mm", role)


def test_one_overload_gets_a_role():
    register_op("aten::add.Tensor", role="split", tokens="self")
    assert snapshot()["aten::add.Tensor"].tokens == "self"
    assert "aten::add" not in snapshot()


def test_all_arguments_are_kept():
    register_op("aten::index_copy", role="prepare", step_state=["index"], reads_context=True, tokens="source")
    expected = RegisteredOp("aten::index_copy", "prepare", ("index",), reads_context=True, tokens="source")
    assert snapshot()["aten::index_copy"] == expected


def test_a_second_registration_replaces_the_first():
    register_op("aten::mm", role="split")
    register_op("aten::mm", role="capture")
    assert snapshot()["aten::mm"].role == "capture"


def test_an_op_defined_later_can_be_registered_then():
    with pytest.raises(UnknownOpError):
        register_op("registry_test::late", role="split")
    with torch.library._scoped_library("registry_test", "DEF") as library:
        library.define("late(Tensor x, Tensor slots, Tensor(a!) out) -> ()")
        register_op("registry_test::late", role="prepare", step_state=("slots",))
    assert snapshot()["registry_test::late"].step_state == ("slots",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dsv4::forward_mqaa", r"torch knows no op 'dsv4::forward_mqaa': did you mean 'dsv4::forward_mqa'\?"),
        ("dsv4::forward_mqa.out", r"torch knows no op 'dsv4::forward_mqa\.out': did you mean "),
        ("aten::add.Tensr", r"did you mean .*'aten::add\.Tensor'"),
        ("forward_mqa", r"torch knows no op 'forward_mqa': "),
        ("nothing::like_it_at_all", r'names read "ns::op" or "ns::op\.overload"\. Import the library that defines it'),
        ("", r"torch knows no op ''"),
    ],
)
def test_an_unknown_op_is_refused_with_a_hint(name, message):
    before = snapshot()
    with pytest.raises(UnknownOpError, match=message):
        register_op(name, role="split")
    assert snapshot() == before


@pytest.mark.parametrize("arguments", [{"step_state": ("slots",)}, {"tokens": "slots"}, {"step_state": "slots"}])
def test_an_unknown_argument_is_refused_and_the_known_ones_are_listed(arguments):
    with pytest.raises(UnknownOpError, match="op 'aten::mm' has no argument 'slots'; it has self, mat2"):
        register_op("aten::mm", role="split", **arguments)
    assert "aten::mm" not in snapshot()


def test_an_unknown_role_is_refused():
    with pytest.raises(ArgumentError, match=r"role is 'eager'; it must be one of split, prepare, capture"):
        register_op("aten::mm", role="eager")


@pytest.mark.parametrize("name", [torch.ops.aten.mm, torch.ops.aten.mm.default, None, b"aten::mm"])
def test_an_op_is_registered_by_its_name_and_not_by_itself(name):
    with pytest.raises(UnknownOpError, match=r'is no op name: give a text, "ns::op" or "ns::op\.overload"'):
        register_op(name, role="split")


def test_tokens_that_name_no_tensor_are_refused():
    """The token count would be unknown, and options that go by it would do nothing."""
    with pytest.raises(ArgumentError, match="tokens is 'dim'; it must be the name of a tensor argument"):
        register_op("aten::index_copy", role="split", tokens="dim")
    register_op("aten::cat", role="split", tokens="tensors")
    register_op("aten::layer_norm", role="split", tokens="weight")


@pytest.mark.parametrize("value", ["x", "", None, 1, torch.tensor(True)])
def test_reads_context_that_is_no_bool_is_refused(value):
    with pytest.raises(ArgumentError, match=r"reads_context is .*; it must be True or False"):
        register_op("aten::mm", role="prepare", reads_context=value)
    assert "aten::mm" not in snapshot()


@pytest.mark.parametrize("value", [3, None, {"slots"}, [1]])
def test_step_state_that_is_no_list_of_names_is_refused(value):
    with pytest.raises(ArgumentError, match=r"step_state is .*; it must be a list of argument names"):
        register_op("aten::mm", role="prepare", step_state=value)
    assert "aten::mm" not in snapshot()


def test_a_snapshot_does_not_see_later_registrations():
    before = snapshot()
    register_op("aten::mm", role="split")
    assert "aten::mm" not in before


def test_registering_from_many_threads_loses_nothing():
    names = [f"aten::{name}" for name in ("mm", "bmm", "addmm", "cat", "exp", "log", "sin", "cos")]
    barrier = threading.Barrier(len(names))
    seen = []

    def register(name):
        barrier.wait()
        for role in ("split", "capture", "prepare"):
            register_op(name, role=role)
            seen.append(snapshot()[name].role == role)

    threads = [threading.Thread(target=register, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 24
    assert all(seen)
    assert {snapshot()[name].role for name in names} == {"prepare"}


@pytest.mark.parametrize("capturable", ["never", "decode", "always"])
def test_a_split_op_promises_for_all_devices(capturable):
    register_op("aten::mm", role="split", capturable=capturable)
    assert snapshot()["aten::mm"] == RegisteredOp("aten::mm", "split", capturable=capturable)
    assert snapshot()["aten::mm"].capturable_on("cuda") == capturable


def test_a_split_op_promises_for_some_devices():
    given = {"cuda": "decode", "xpu": "always"}
    register_op("aten::mm", role="split", capturable=given)
    given["cpu"] = "always"
    op = snapshot()["aten::mm"]
    assert [op.capturable_on(device) for device in ("cuda", "xpu", "cpu")] == ["decode", "always", "never"]
    assert hash(op) == hash(snapshot()["aten::mm"])


@pytest.mark.parametrize(
    "capturable",
    ["Decode", "", "full", True, None, 1, ["decode"], {}, {"cuda": True}, {"cuda": "sometimes"}, {0: "decode"}],
)
def test_another_promise_is_refused(capturable):
    before = snapshot()
    with pytest.raises(ArgumentError, match=r"capturable is .*; it must be one of never, decode, always, or a dict"):
        register_op("aten::mm", role="split", capturable=capturable)
    assert snapshot() == before


def test_the_option_split_ops_keeps_a_promise():
    register_op("aten::mm", role="capture", capturable="decode")
    forced = with_split_ops(snapshot(), ["aten::mm"])["aten::mm"]
    assert (forced.role, forced.capturable) == ("split", "decode")
