"""Step tensors reach the model in one copy, at addresses that never change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4_compile.runners.batch import REQUEST_FIELDS, TOKEN_PADDING
from dsv4_compile.runners.step_inputs import FreshInputs, ModelInputs, PersistentInputs

CPU = torch.device("cpu")
MOST = 37  # an odd number: fields begin where the one before has left a gap
REQUESTS = 3


def step_of(tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Fields as the batch builder makes them."""
    generator = torch.Generator().manual_seed(seed)
    wide = {"input_ids", "positions"} | {name for name in TOKEN_PADDING if name.endswith("slot_mapping")}
    draw = lambda *shape: torch.randint(1, 1000, shape, generator=generator)  # noqa: E731
    fields = {name: draw(tokens).to(torch.int64 if name in wide else torch.int32) for name in TOKEN_PADDING}
    shapes = {"query_start_loc": (REQUESTS + 1,), "seq_lens": (REQUESTS,)}
    return fields | {name: draw(*shapes.get(name, (REQUESTS, 5))).to(torch.int32) for name in REQUEST_FIELDS}


def fields_of(made: ModelInputs) -> dict[str, Tensor]:
    step = {name: getattr(made.step, name) for name in (*TOKEN_PADDING, *REQUEST_FIELDS) if hasattr(made.step, name)}
    return {"input_ids": made.input_ids, "positions": made.positions, **step}


class Ops(TorchDispatchMode):
    """Counts the ops that are no views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and "set_" not in function.name():
            self.seen[function.name()] += 1
        return function(*args, **(kwargs or {}))


def test_a_step_is_packed_and_copied_once() -> None:
    inputs = PersistentInputs(step_of(0), MOST, CPU)
    for tokens in (5, 0, MOST):
        host = step_of(tokens)
        with Ops() as ops:
            inputs.make(host, tokens)
        assert {name: count for name, count in ops.seen.items() if "empty" not in name} == {
            "aten::cat.out": 1,
            "aten::copy_": 1,
        }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_values_are_those_of_fresh_tensors(mode: Callable[[], Any]) -> None:
    with mode():
        inputs = PersistentInputs(step_of(0), MOST, CPU)
    for seed, (tokens, padded) in enumerate([(5, 8), (MOST, MOST), (0, 1), (1, 1), (36, 37)]):
        host = step_of(tokens, seed)
        fresh = fields_of(FreshInputs(CPU).make(host, padded))
        for name, tensor in fields_of(inputs.make(host, padded)).items():
            assert (tensor.dtype, tensor.shape) == (fresh[name].dtype, fresh[name].shape), name
            assert torch.equal(tensor, fresh[name]), name


def test_rows_behind_a_short_step_are_padding() -> None:
    inputs = PersistentInputs(step_of(0), MOST, CPU)
    inputs.make(step_of(MOST), MOST)
    inputs.make(step_of(2), 4)
    whole = fields_of(inputs.make(step_of(2), MOST))
    for name, padding in TOKEN_PADDING.items():
        assert (whole[name][2:] == padding).all(), name


def test_addresses_never_change_and_are_aligned() -> None:
    inputs = PersistentInputs(step_of(0), MOST, CPU)
    addresses = {
        tuple(tensor.data_ptr() for tensor in fields_of(inputs.make(step_of(tokens), tokens)).values())
        for tokens in (1, 7, MOST, 2)
    }
    assert len(addresses) == 1
    (first, *others) = sorted(*addresses)
    assert all((address - first) % 256 == 0 for address in others)


def test_each_field_is_a_tensor_of_its_own_to_whoever_traces() -> None:
    tensors = fields_of(PersistentInputs(step_of(0), MOST, CPU).make(step_of(3), 3)).values()
    assert len({tensor.untyped_storage()._cdata for tensor in tensors}) == len(tensors)
    assert not any(tensor._is_view() or tensor.storage_offset() or tensor.is_inference() for tensor in tensors)


def test_fields_outlive_who_made_them() -> None:
    made = fields_of(PersistentInputs(step_of(0), MOST, CPU).make(step_of(3), 3))
    assert torch.equal(made["positions"], step_of(3)["positions"])


def test_host_tensors_may_be_views() -> None:
    inputs = PersistentInputs(step_of(0), MOST, CPU)
    host = step_of(6)
    table = torch.zeros(5, 2 * REQUESTS, dtype=torch.int32)[:, ::2].t()
    host["block_table"] = table.copy_(host["block_table"])
    host["positions"] = torch.stack([host["positions"]] * 2, 1)[:, 1]
    made = fields_of(inputs.make(host, 6))
    assert torch.equal(made["block_table"], host["block_table"])
    assert torch.equal(made["positions"], host["positions"])


# pinned memory, which a copy reads after the call


class Event:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("wait")


def test_the_copy_of_the_step_before_has_read_what_is_refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, log = PersistentInputs(step_of(0), MOST, CPU), []
    inputs._copied = Event(log)  # type: ignore[assignment]
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, out: log.append("refill") or cat(parts, out=out))
    inputs.make(step_of(3), 3)
    assert log == ["wait", "refill"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_steps_that_come_faster_than_the_device_works() -> None:
    inputs, found = PersistentInputs(step_of(0), MOST, torch.device("cuda")), []
    assert inputs._staged.is_pinned()
    for seed in range(8):
        torch.cuda._sleep(20_000_000)
        made = fields_of(inputs.make(step_of(MOST, seed), MOST))
        found.append({name: tensor.clone() for name, tensor in made.items()})
    for seed, fields in enumerate(found):
        assert all(torch.equal(fields[name].cpu(), step_of(MOST, seed)[name]) for name in TOKEN_PADDING)
