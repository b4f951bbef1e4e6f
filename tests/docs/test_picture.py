"""The picture of plans: what it shows is what the plans say, it loads nothing, and the committed one is the newest."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from _picture import LETTERS, draw_plans, short_label
from layer_plans import layer_plan
from repository import ROOT

from dsv4_compile.inspect.plan import PlanOp

COMMITTED = ROOT / "docs" / "c4a_layer.svg"
SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def texts(picture: str, css: str) -> list[str]:
    return [text.text or "" for text in drawn(picture).iter(f"{SVG}text") if text.get("class") == css]


def boxes(picture: str) -> Counter[str]:
    """How many boxes of ops there are of each kind."""
    return Counter(str(group[1].get("class")) for group in drawn(picture).iter(f"{SVG}g"))


def draw(*policies: str) -> str:
    return draw_plans("A layer", layer_plan(4, "wide"), {policy: layer_plan(4, policy) for policy in policies})


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("inspect_partition")


def test_the_committed_picture_is_what_the_example_draws(example: ModuleType, tmp_path: Path) -> None:
    example.main(["--svg", str(tmp_path / "new.svg")])
    assert (tmp_path / "new.svg").read_text(encoding="utf-8") == COMMITTED.read_text(encoding="utf-8"), (
        f"draw it again: python examples/inspect_partition.py --svg {COMMITTED.relative_to(ROOT)}"
    )


def test_two_commands_at_once_and_a_place_that_cannot_be_written(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main([str(tmp_path), "--svg", str(tmp_path / "a.svg")])
    assert "FOLDER and --svg are two commands" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        example.main(["--svg", str(tmp_path / "none" / "a.svg")])
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_every_op_is_drawn_once_in_every_column() -> None:
    # 17 ops; wide: 10 captured, 5 must be eager, 2 lie in between; minimal: 12 and 5; narrow: 15 and 2
    assert boxes(draw("wide")) == {"plain": 17, "captured": 10, "must": 5, "between": 2}
    assert boxes(draw("minimal")) == {"plain": 17, "captured": 12, "must": 5}
    assert boxes(draw("narrow")) == {"plain": 17, "captured": 15, "must": 2}


def test_headings_and_units() -> None:
    picture = draw("wide", "narrow")
    assert texts(picture, "heading") == ["Before: plain PyTorch", "wide", "narrow"]
    assert texts(picture, "unit") == [
        "every op on its own",
        "piece_0: 6 ops, one replay",
        "region_0: 7 ops, run one by one",
        "piece_1: 4 ops, one replay",
        "piece_0: 11 ops, one replay",
        "region_0: 2 ops, run one by one",
        "piece_1: 4 ops, one replay",
    ]


def test_pointing_at_a_box_tells_why() -> None:
    hints = [group[0].text for group in drawn(draw("wide")).iter(f"{SVG}g")]
    assert "dsv4::sparse_indexer: eager, split op" in hints
    assert "dsv4::qnorm_rope_kv_insert: eager, reads step state step.swa_slot_mapping" in hints
    assert "linear[indexer.compressor.fused_wkv_wgate.weight]: captured" in hints


def test_columns_lie_inside_and_beside_each_other() -> None:
    picture = drawn(draw("wide", "minimal", "narrow"))
    _, _, width, height = map(float, str(picture.get("viewBox")).split())
    frames = [r for r in picture.iter(f"{SVG}rect") if r.get("rx") == "7"]
    edges = sorted({(float(f.get("x", 0)), float(f.get("x", 0)) + float(f.get("width", 0))) for f in frames})
    assert len(edges) == 4
    assert all(right < left for (_, right), (left, _) in itertools.pairwise(edges))
    assert edges[-1][1] < width
    assert all(float(f.get("y", 0)) + float(f.get("height", 0)) < height for f in frames)


def test_it_loads_nothing_and_escapes_names() -> None:
    plan = layer_plan(4, "wide")
    unit = plan.units[0]
    odd = dataclasses.replace(unit.ops[0], op="<script>&", weight=None)
    changed = dataclasses.replace(plan, units=(dataclasses.replace(unit, ops=(odd,)), *plan.units[1:]))
    picture = draw_plans("a < b", changed, {"c & d": changed})
    assert "<script>" not in picture
    assert "<script>&" in [text.text for text in drawn(picture).iter(f"{SVG}text")]
    assert "url(" not in picture
    assert "href" not in picture


@pytest.mark.parametrize(
    ("name", "weight", "label"),
    [
        ("bmm", None, "bmm"),
        ("dsv4::sparse_indexer", None, "sparse_indexer"),
        ("dsv4::forward_mqa", "attn_sink", "forward_mqa"),
        ("linear", "wq_b.weight", "linear wq_b"),
        ("linear", "weights[0]", "linear"),
        ("linear", "indexer.compressor.fused_wkv_wgate.weight", "linear indexer…fused_wkv_wgate"),
        ("dsv4::compress_kv_insert", "indexer.compressor.ape", "compress_kv_insert indexer"),
    ],
)
def test_short_labels(name: str, weight: str | None, label: str) -> None:
    op = PlanOp(node="n", op=name if weight is None else f"{name}[{weight}]", reason=None, line="", weight=weight)
    assert op.name == name
    assert short_label(op) == label
    assert len(label) <= LETTERS
