"""How the tensors of a step reach the model: the one thing in which the two runners differ.

Both make the same numbers, padded to the same size. `FreshInputs` (mrv1) hands over new tensors every step, so
nothing may remember their addresses. `PersistentInputs` (mrv2) refills buffers that live as long as the runner and
hands over their leading rows; it marks them static, so that a compiler may rely on the addresses, and it keeps
the rest of every buffer at the padding value, so that rows left by a longer step are never read.

Copies to a GPU do not wait for it: they are in the order of its stream, and CUDA has read memory that is not pinned
when the call returns. `PersistentInputs` makes one copy a step, since a launch costs the host more than these bytes
cost the bus: all fields are packed into pinned memory, which the copy of the step before must have left by then. Sizes
of the request dimension never change, and are marked static so that Dynamo does not make them symbolic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch._dynamo import mark_static, mark_static_address

from ..models.deepseek_v4.step import StepState
from .batch import REQUEST_FIELDS, TOKEN_PADDING

# Bytes: what an allocation of its own would be aligned to, as far as kernels care.
ALIGNMENT = 256


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
    """Buffers of `max_num_tokens` rows that every step refills in place, with one copy.

    Args:
        host: fields like those of every step: a step of no tokens.
        max_num_tokens: rows of the per-token fields.
        device: where the model is.
    """

    def __init__(self, host: Mapping[str, Tensor], max_num_tokens: int, device: torch.device) -> None:
        # written in any mode later, so not made in inference mode
        with torch.inference_mode(False), torch.no_grad():
            shapes = {name: torch.Size((max_num_tokens,)) for name in TOKEN_PADDING}
            shapes |= {name: host[name].shape for name in REQUEST_FIELDS}
            self._tails = {name: _tail(host[name].dtype, shapes[name], TOKEN_PADDING.get(name, 0)) for name in shapes}
            nbytes = sum(len(tail) for tail in self._tails.values())
            self._staged = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            self._packed = torch.empty(nbytes, dtype=torch.uint8, device=device)
            starts = dict(zip(shapes, accumulate(map(len, self._tails.values()), initial=0), strict=False))
            self._fields = {
                name: _own_tensor(self._packed[starts[name] :], host[name].dtype, shape)
                for name, shape in shapes.items()
            }
        self._buffers = dict(self._fields)
        self._copied: torch.cuda.Event | None = None
        self.make(host, max_num_tokens)

    def make(self, host: Mapping[str, Tensor], num_tokens: int) -> ModelInputs:
        """Refill the buffers and hand over their leading `num_tokens` rows."""
        self._refill(host)
        made = {name: _leading_rows(self._buffers[name], num_tokens) for name in TOKEN_PADDING}
        made |= {name: self._buffers[name] for name in REQUEST_FIELDS}
        for tensor in made.values():
            mark_static_address(tensor)
        return _as_inputs(made)

    def _refill(self, host: Mapping[str, Tensor]) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        parts: list[Tensor] = []
        for name, tail in self._tails.items():
            field = self._fields[name]
            given = host[name].to(field.dtype).contiguous().view(-1).view(torch.uint8)
            assert len(given) <= field.nbytes, f"{name} has more rows than its buffer"
            parts += (given, tail[len(given) :])
        with torch.no_grad():
            torch.cat(parts, out=self._staged)
            self._packed.copy_(self._staged, non_blocking=True)
            if self._packed.is_cuda:
                self._copied = torch.cuda.current_stream(self._packed.device).record_event()
            for name, field in self._fields.items():
                if self._buffers[name] is not field:  # somebody has put another one of its layout there
                    self._buffers[name].copy_(field)


def _tail(dtype: torch.dtype, shape: torch.Size, padding: int) -> Tensor:
    """The bytes of a field that a step leaves empty, up to where the next field may begin."""
    nbytes = shape.numel() * dtype.itemsize
    aligned = -(-nbytes // ALIGNMENT) * ALIGNMENT
    return torch.full((aligned // dtype.itemsize,), padding, dtype=dtype).view(torch.uint8)


def _own_tensor(memory: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A tensor at the start of some bytes, with a storage of its own over them.

    Whoever traces the model takes tensors of one storage for views of one tensor.
    """
    nbytes = shape.numel() * dtype.itemsize
    made: Tensor = torch.utils.dlpack.from_dlpack(memory[:nbytes].view(dtype).view(shape))
    return made


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
