"""Each benchmark runs, in a size that takes seconds; no figure is judged here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import device_check, dispatch, import_time, memory, plan_time, ttft


def test_dispatch(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch.main(["--layers", "2", "--seconds", "0.05"])
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == ["floor", "eager", "uncaptured", "captured"]


def test_ttft(capsys: pytest.CaptureFixture[str]) -> None:
    ttft.main(["--layers", "3", "--tokens", "8", "--seconds", "0.05"])
    rows = capsys.readouterr().out.splitlines()[2:]
    # C128A, C128A, C4A: wide 3 + 3 + 7 eager ops, minimal 3 + 3 + 5, narrow 1 + 1 + 2
    assert [(row.split()[-1]) for row in rows] == ["all", "13", "11", "4"]


def test_memory_of_a_stack_does_not_grow_with_layers_or_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(["--layers", "4", "8", "--tokens", "16"])
    stacks, buckets = capsys.readouterr().out.split("\n\n")
    planned = [int(line.split()[3]) for line in stacks.splitlines()[1:]]
    assert planned[:3] == planned[3:]  # 4 layers and 8 layers, three configurations each
    assert len({line.split()[1] for line in buckets.splitlines()[1:]}) == 1  # one arena, made for the largest


def test_plan_time(capsys: pytest.CaptureFixture[str]) -> None:
    plan_time.main(["--layers", "2", "--repeats", "1"])
    assert "infer_effects + choose_regions: " in capsys.readouterr().out


def test_import_time() -> None:
    assert import_time.seconds_to_import("json") > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_device_check_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main([]) == 0
    assert capsys.readouterr().out == "no GPU\n"
