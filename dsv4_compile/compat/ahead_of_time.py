"""What Dynamo's ahead-of-time path asks of a backend's callable: that it can be written to disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_NOT_KEPT = "captured programs are not kept on disk: they hold the addresses of this process"


def in_memory(call: Callable[..., object]) -> Callable[..., object]:
    """The callable as the ahead-of-time path takes it; asked to be written to disk, it says that it cannot."""
    try:
        from torch._dynamo.aot_compile_types import SerializableCallable
    except ImportError:  # not in every version; then nobody asks
        return call

    class InMemory(SerializableCallable):
        def __call__(self, *args: Any, **kwargs: Any) -> object:
            return call(*args, **kwargs)

        @classmethod
        def serialize_compile_artifacts(cls, fn: object) -> NoReturn:
            raise NotImplementedError(_NOT_KEPT)

        @classmethod
        def deserialize_compile_artifacts(cls, data: bytes) -> NoReturn:
            raise NotImplementedError(_NOT_KEPT)

    return InMemory()
