"""What is asked of torch's allocator and streams by private names, without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_compile.compat.cuda import is_external, record_use


def test_memory_of_a_device_is_recorded_and_that_of_the_host_is_not() -> None:
    recorded: list[object] = []
    on_device: Any = SimpleNamespace(is_cuda=True, record_stream=recorded.append)
    stream: Any = object()
    record_use(on_device, stream)
    record_use(torch.ones(2), stream)
    assert recorded == [stream]


@pytest.mark.parametrize(
    ("stream_id", "external"),
    [(0, False), (3, False), (35, False), (0x7F00_0000_1230, True)],
    ids=["the default stream", "one of torch's", "one of high priority", "an address"],
)
def test_streams_that_torch_did_not_make(stream_id: int, external: bool) -> None:
    stream: Any = SimpleNamespace(stream_id=stream_id)
    assert is_external(stream) == external
