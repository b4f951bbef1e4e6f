"""Passes and rules that can be taken away, and programs that then go wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from program_checks import Setting, check_program, register_step_ops
from torch import Tensor, fx

from dsv4_compile.analysis.dependencies import predecessors

toy = torch.ops.toy


PASSES = {
    name: importlib.import_module(f"dsv4_compile.passes.{name}")  # each module has the name of its function
    for name in ("move_nodes", "choose_regions", "partition_graph", "find_duplicates")
}


# Programs in which a move is tempting and one kind of dependence forbids it: (x, y, w, cache, pick, step, k, scale).
def read_before_write(x: Tensor, y: Tensor, *rest: Any, **more: Any) -> Tensor:
    toy.fresh(y)
    h = x + 1
    toy.attn(y, x)
    return h


def write_before_read(x: Tensor, y: Tensor, *rest: Any, **more: Any) -> Tensor:
    toy.fresh(y)
    x.mul_(2)
    return toy.fresh(x)


def effect_before_work(x: Tensor, y: Tensor, *rest: Any, **more: Any) -> Tensor:
    toy.fresh(y)
    h = x * 2
    toy.tick(y)
    return h


def draw_before_draw(x: Tensor, y: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
    first = torch.rand_like(toy.fresh(y))
    return first, toy.fresh(torch.rand(3))


DEPENDENCES = {
    "reads": (read_before_write, {"reads": frozenset()}),
    "writes": (write_before_read, {"writes": frozenset()}),
    "barriers": (effect_before_work, {"barrier": None}),
    "draws": (draw_before_draw, {"random": False}),
}


def forget(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Let moves be planned as if nodes had less of an effect; the later checks see it all."""

    def fewer(nodes: Sequence[fx.Node], effects: Any) -> Any:
        return predecessors(nodes, {node: replace(done, **changes) for node, done in effects.items()})

    monkeypatch.setattr(PASSES["move_nodes"], "predecessors", fewer)


def run(program: Callable[..., Any], region: str = "minimal", runner: str = "mrv2") -> None:
    register_step_ops()
    setting = Setting(combination=(runner, region), engine="off", check="addresses", tokens=(5, 3))
    with torch.no_grad():
        check_program(program, setting)


def prepared(x: Tensor, y: Tensor, w: Tensor, cache: Tensor, pick: Tensor, step: Tensor, **rest: Any) -> Tensor:
    h = x @ w
    toy.kv_write(h, step, cache)
    return toy.fresh(h)


def in_context(x: Tensor, y: Tensor, w: Tensor, cache: Tensor, **rest: Any) -> Tensor:
    h = x @ w
    toy.context_write(h, cache)
    return toy.fresh(h)
