"""What holds for every op: its schema tells the truth, fakes agree, padding touches nothing, no row is no error."""

import importlib

import op_samples
import pytest
import torch
from torch import Tensor

from dsv4_compile.ops.registry import snapshot


def run(name, arguments):
    assert op_samples.op(name)(**arguments) is None
    return arguments


def written(name, arguments):
    """Names and values of the arguments that the schema marks as mutated."""
    schema = op_samples.op(name)._schema
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def numbers(value):
    """fp32 of 8-bit floats, with which torch does not calculate."""
    return value.float() if value.dtype is torch.float8_e4m3fn else value


def test_there_is_a_sample_of_every_op():
    assert {f"dsv4::{name}" for name in op_samples.VARIANTS} == {n for n in snapshot() if n.startswith("dsv4::")}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "variant"), op_samples.ALL)
def test_opcheck(name, variant, dtype):
    arguments = op_samples.sample(name, variant, dtype=dtype)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(value.dtype is torch.float8_e4m3fn for value in arguments.values() if isinstance(value, Tensor)):
        # it compares with `allclose`, which torch lacks for 8-bit floats; what is written has a test of its own
        checks.append("test_schema")
    result = torch.library.opcheck(op_samples.op(name), (), arguments, test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("name", "variant"), op_samples.ALL)
def test_padded_rows_change_nothing(name, variant):
    plain = run(name, op_samples.sample(name, variant))
    padded = run(name, op_samples.pad(name, op_samples.sample(name, variant), 6))
    for key, expected in written(name, plain).items():
        if key.endswith("cache"):
            assert torch.equal(padded[key], expected)
        else:
            tokens = slice(op_samples.NUM_TOKENS)
            torch.testing.assert_close(numbers(padded[key][tokens]), numbers(expected[tokens]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "variant"), op_samples.ALL)
def test_a_step_of_padding_alone_changes_no_cache(name, variant):
    arguments = op_samples.pad(name, op_samples.sample(name, variant), 6)
    before = {}
    for key, rows in op_samples.token_rows(name, arguments).items():
        arguments[key] = rows[op_samples.NUM_TOKENS :]
    for key, value in arguments.items():
        before[key] = value.clone() if isinstance(value, Tensor) else value
    run(name, arguments)
    for key in written(name, arguments):
        if key.endswith("cache"):
            assert torch.equal(arguments[key], before[key])


@pytest.mark.parametrize(("name", "variant"), op_samples.ALL)
def test_no_tokens(name, variant):
    arguments = op_samples.sample(name, variant)
    for key, rows in op_samples.token_rows(name, arguments).items():
        arguments[key] = rows[:0]
    before = {key: value.clone() for key, value in written(name, arguments).items()}
    run(name, arguments)
    for key, value in written(name, arguments).items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(("name", "variant"), op_samples.ALL)
def test_nothing_but_declared_arguments_is_written(name, variant):
    arguments = op_samples.sample(name, variant)
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, Tensor)}
    run(name, arguments)
    changed = {key for key, value in before.items() if not torch.equal(arguments[key], value)}
    assert changed == set(written(name, arguments))


CAPTURED = [(name, variant) for name, variant in op_samples.ALL if snapshot()[f"dsv4::{name}"].role != "split"]


@pytest.mark.parametrize(("name", "variant"), CAPTURED)
def test_what_may_be_captured_reads_no_value_on_the_host(name, variant):
    # on the meta device there are no values: an .item(), a nonzero or a branch on data raises
    implementation = getattr(importlib.import_module(f"dsv4_compile.ops.{name}"), name)
    arguments = op_samples.sample(name, variant).items()
    implementation(**{key: value.to("meta") if isinstance(value, Tensor) else value for key, value in arguments})
