"""Tiny models, made once, and the tokens that vLLM itself gives for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from vllm_models import Served, make_model, serve


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: make_model(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="session")
def eager(model: Callable[[str], Path]) -> Callable[[str], Served]:
    return cache(lambda kind: serve(model(kind), {"enforce_eager": True}))
