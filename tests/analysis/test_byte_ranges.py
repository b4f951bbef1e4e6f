"""Which bytes tensors span, and which of them they share."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.analysis.byte_ranges import byte_range, share_bytes

BUFFER = torch.zeros(6, 8)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (BUFFER[:, :4], BUFFER[:, 4:], False),
        (BUFFER[:, :5], BUFFER[:, 4:], True),
        (BUFFER[::2], BUFFER[1::2], False),
        (BUFFER[::2], BUFFER[2:3], True),
        (BUFFER.view(torch.int16)[:, ::4], BUFFER.view(torch.int16)[:, 1::4], False),
        (BUFFER.view(torch.int16)[:, 3::4], BUFFER[:, 1::2], True),
        (BUFFER.view(torch.int16)[:, 3::4], BUFFER[:, ::2], False),
        (BUFFER[:1, ::2].expand(4, 4), BUFFER[0, 1::2], False),
        (BUFFER[:1, ::2].expand(4, 4), BUFFER[0, 2:3], True),
        (BUFFER.view(-1).unfold(0, 3, 2), BUFFER.t(), True),
        (BUFFER[3, 3], BUFFER.diagonal(), True),
        (BUFFER[:0], BUFFER, False),
        (BUFFER, torch.zeros(6, 8), False),
    ],
)
def test_shared_bytes(first: torch.Tensor, second: torch.Tensor, shared: bool) -> None:
    assert share_bytes(first, second) == share_bytes(second, first) == shared


def test_a_span_is_from_the_first_element_to_the_last() -> None:
    start = BUFFER.data_ptr()
    assert byte_range(BUFFER[1:3, :2]) == (start + 32, start + 72)
    assert byte_range(BUFFER[:0]) == (0, 0)
