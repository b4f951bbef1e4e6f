"""How the tensors of a step reach the model: the one thing in which the two runners differ.

Both make the same numbers, padded to the same size. `FreshInputs` (mrv1) hands over new tensors every step, so
nothing may remember their addresses. `PersistentInputs` (mrv2) refills buffers that live as long as the runner and
hands over their leading rows; it marks them static, so that a compiler may rely on the addresses, and it keeps
the rest of every buffer at the padding value, so that rows left by a longer step are never read.

Copies to a GPU do not wait for it: they are in the order of its stream, and CUDA has read memory that is not pinned
when the call returns. Sizes of the request dimension never change, and are marked static so that Dynamo does not make
them symbolic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch._dynamo import mark_static, mark_static_address

from ..models.deepseek_v4.step import StepState
from .batch import REQUEST_FIELDS, TOKEN_PADDING


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The arguments of one call of the model: token ids [T], positions [T], both int64, and the step state."""

    input_ids: Tensor
    positions: Tensor
    step: StepState


class InputMaker(Protocol):
    """Turns the host tensors of a step into the model's inputs of `num_tokens` rows, padding included."""

    def make(self, host: Mapping[str, Tensor], num_tokens: int) -> ModelInputs:
        """Pad and move the fields of a step to the device."""


@dataclass(frozen=True, slots=True)
class FreshInputs:
    """New tensors for every step."""

    device: torch.device

    def make(self, host: Mapping[str, Tensor], num_tokens: int) -> ModelInputs:
        """Pad and move the fields of a step to the device."""
        made = {name: self._pad(host[name], num_tokens, padding) for name, padding in TOKEN_PADDING.items()}
        made |= {name: host[name].to(self.device, non_blocking=True) for name in REQUEST_FIELDS}
        return _as_inputs(made)

    def _pad(self, rows: Tensor, num_tokens: int, padding: int) -> Tensor:
        padded = torch.full((num_tokens,), padding, dtype=rows.dtype, device=self.device)
        padded[: len(rows)].copy_(rows, non_blocking=True)
        return padded


class PersistentInputs:
    """Buffers of `max_num_tokens` rows that every step refills in place."""

    def __init__(self, host: Mapping[str, Tensor], max_num_tokens: int, device: torch.device) -> None:
        """Allocate the buffers for fields like those of `host`, a step of no tokens."""
        self._buffers = {name: torch.empty_like(host[name], device=device) for name in REQUEST_FIELDS}
        for name in TOKEN_PADDING:
            self._buffers[name] = torch.empty(max_num_tokens, dtype=host[name].dtype, device=device)
        self.make(host, max_num_tokens)

    def make(self, host: Mapping[str, Tensor], num_tokens: int) -> ModelInputs:
        """Refill the buffers and hand over their leading `num_tokens` rows."""
        for name, padding in TOKEN_PADDING.items():
            used = len(host[name])
            self._buffers[name][:used].copy_(host[name], non_blocking=True)
            self._buffers[name][used:] = padding
        for name in REQUEST_FIELDS:
            self._buffers[name].copy_(host[name], non_blocking=True)
        made = {name: _leading_rows(self._buffers[name], num_tokens) for name in TOKEN_PADDING}
        made |= {name: self._buffers[name] for name in REQUEST_FIELDS}
        for tensor in made.values():
            mark_static_address(tensor)
        return _as_inputs(made)


def _leading_rows(buffer: Tensor, num_rows: int) -> Tensor:
    """The memory of `buffer[:num_rows]`, but not a view of it.

    Dynamo looks at the base of a view as well: if the first step it sees fills the buffer, it guards that the token
    count is the size of the buffer, and compiles again for every other one.
    """
    assert num_rows <= len(buffer), "set_ would make the storage larger, and so move it"
    rows = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    return rows.set_(buffer.untyped_storage(), 0, (num_rows,), (1,))


def _as_inputs(made: dict[str, Tensor]) -> ModelInputs:
    for name in REQUEST_FIELDS:
        mark_static(made[name])
    input_ids, positions = made.pop("input_ids"), made.pop("positions")
    return ModelInputs(input_ids, positions, StepState(**made))
