"""What Inductor keeps on disk is kept apart by the vector instructions that it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.utils import fresh_cache

from dsv4_compile.compat.inductor import compile_with_inductor

CAPABILITIES = (None, "default")


def has_vector_instructions() -> bool:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return bool(pick_vec_isa())


def chosen(monkeypatch: pytest.MonkeyPatch, capability: str | None) -> None:
    if capability is None:
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    else:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)


@pytest.mark.inductor
@pytest.mark.parametrize("own_tag", ["", "of the user"])
def test_the_key_says_for_which_instructions_code_is(monkeypatch: pytest.MonkeyPatch, own_tag: str) -> None:
    config: Any = torch.compiler.config
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, **__: config.cache_key_tag)
    graph = fx.symbolic_trace(lambda x: x + 1)
    tags: dict[tuple[str, str | None], object] = {}
    with config.patch(cache_key_tag=own_tag):
        for device in ("cpu", "meta"):
            for capability in CAPABILITIES:
                chosen(monkeypatch, capability)
                tags[device, capability] = compile_with_inductor(graph, [torch.empty(4, device=device)])
        assert config.cache_key_tag == own_tag
    assert all(str(tag).startswith(own_tag) for tag in tags.values())
    assert tags["meta", None] == tags["meta", "default"] == own_tag
    chosen(monkeypatch, None)
    assert (tags["cpu", None] != tags["cpu", "default"]) == has_vector_instructions()


@pytest.mark.inductor
@pytest.mark.exhaustive
def test_code_for_other_instructions_is_not_taken_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def gate(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x * 2)

    with fresh_cache():
        for capability in (*CAPABILITIES, None):
            chosen(monkeypatch, capability)
            torch._dynamo.reset()
            compiled = torch.compile(gate, backend="dsv4_piecewise", options={"piece_compiler": "inductor"})
            for length in (5, 64, 65):
                x = torch.linspace(-3, 3, length)
                torch.testing.assert_close(compiled(x), gate(x))
