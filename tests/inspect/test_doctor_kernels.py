"""What the doctor says of who computes the ops on a GPU."""

from __future__ import annotations

import pytest

from dsv4_compile.inspect import doctor
from dsv4_compile.ops.kernels import serve


def test_ops_in_torch_are_named_when_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_OPS", "torch")
    assert doctor.describe_kernels() == "plain torch, also on GPUs: DSV4_OPS=torch"


def test_without_triton_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "KERNELS_SERVE", False)
    assert doctor.describe_kernels() == f"plain torch, also on GPUs: {serve.NO_TRITON}"


def test_with_triton_its_version_and_that_no_gpu_has_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "KERNELS_SERVE", True)
    assert "none has run them yet" in doctor.describe_kernels()
