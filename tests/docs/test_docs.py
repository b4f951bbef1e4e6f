"""What README.md and docs/ say of the code is so: options, error classes, counts, messages, passes, tests by name."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from pages import FENCE, PAGES, README, blocks, headings
from repository import ROOT

from dsv4_compile import counters, errors, explain
from dsv4_compile.config import Config
from dsv4_compile.errors import OptionError
from dsv4_compile.models.deepseek_v4 import DeepseekV4Config, LayerKind, bytes_per_token, layer_cache_specs
from dsv4_compile.passes import partition_graph, partitioned_passes, pass_name, traced_passes

TROUBLE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\0"
LEAST = 15  # letters that a message must share with the code to be taken for its own


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its two head lines."""
    section = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    lines = re.findall(r"^\|(.*)\|$", re.split(r"^#+ ", section, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def literals(annotation: Any) -> set[Any]:
    """The values that a type names."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for part in get_args(annotation) for value in literals(part)}


def accepts(name: str, value: object) -> bool:
    try:
        Config.from_options({name: value})
    except OptionError:
        return False
    return True


def test_the_options_table_has_every_option_with_its_default_first() -> None:
    rows = table_rows(README, "## Options")
    assert [row[0].strip("`") for row in rows] == [field.name for field in fields(Config)]
    for row, field in zip(rows, fields(Config), strict=True):
        assert ast.literal_eval(re.findall(r"`([^`]+)`", row[1])[0]) == field.default


@pytest.mark.parametrize("name", [field.name for field in fields(Config)])
def test_the_options_table_lists_the_values_that_are_accepted(name: str) -> None:
    (values,) = [row[1] for row in table_rows(README, "## Options") if row[0] == f"`{name}`"]
    accepted = {value for value in literals(get_type_hints(Config)[name]) if accepts(name, value)}
    assert set(re.findall(r'`"([^"]+)"`', values)) == accepted


def test_every_error_class_has_a_section_and_every_section_a_class() -> None:
    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert {heading.strip("`") for heading in headings(TROUBLE) if heading.endswith("Error`")} == classes


def test_every_count_is_explained() -> None:
    names = [name for row in table_rows(TROUBLE, "## What the counts tell") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(names) == sorted(counters.snapshot())
    assert {f"`counters.{name}`" for name in ("uncaptured_calls", "recaptures", "eager_op_calls")} <= set(
        headings(TROUBLE)
    )


@cache
def messages() -> list[tuple[str, ...]]:
    """Every text in the code of the package, cut at what is filled in."""
    found = []
    for folder in ("dsv4_compile", "passes", "ops"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                text = template(node)
                if len(text) >= LEAST:
                    found.append(tuple(re.split(r"\0|%[sd]", text)))
    return found


def template(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) if isinstance(value, ast.Constant) else HOLE for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def shared(parts: Sequence[str], text: str) -> int:
    """How many letters of a text come from a message whose beginning it is, filled in somehow; -1 if it is none."""
    first, rest = parts[0], parts[1:]
    if len(text) <= len(first):
        return len(text) if first.startswith(text) else -1
    if not text.startswith(first) or not rest:
        return -1
    best = max(shared(rest, text[cut:]) for cut in range(len(first), len(text) + 1))
    return best if best < 0 else best + len(first)


QUOTED = sorted({" ".join(block.split()) for page in PAGES for block in blocks(page, "text")})


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_ours(message: str) -> None:
    assert max(shared(parts, message) for parts in messages()) >= LEAST


def test_a_message_that_nobody_writes_is_noticed() -> None:
    made_up = "torch knows no operator 'a': did you mean 'b'?"
    assert max(shared(parts, made_up) for parts in messages()) < LEAST


REASONS = [reason for row in table_rows(TROUBLE, "## `counters.eager_op_calls`") for reason in row[0].split("; ")]
SHORT = [("split op",), ("preparation op",)]


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_of_the_table_is_one_of_ours(reason: str) -> None:
    fragments = [part.strip(" ,") for part in reason.split("...") if part.strip(" ,")]
    assert any(all(fragment in HOLE.join(parts) for fragment in fragments) for parts in [*messages(), *SHORT])


def test_the_pipeline_lists_the_passes_in_order() -> None:
    pipeline = FENCE.findall((ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8"))[0][1]
    config = Config()
    traced = traced_passes(config, None, None, None)  # type: ignore[arg-type]
    in_order = (*traced, partition_graph, *partitioned_passes(config))
    expected = [pass_name(one) for one in in_order]
    assert re.findall(r"^  (\w+)", pipeline, re.MULTILINE) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file, test in re.findall(r"\b(tests/[\w/]+\.py)(?:::(\w+))?", text):
        assert (ROOT / file).is_file(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
    folders = "dsv4_compile|passes|ops|tests|examples|benchmarks|docs"
    for file in re.findall(rf"`((?:{folders})/[\w/]*(?:\.\w+)?)`", text):
        assert (ROOT / file).exists(), file


def test_every_invariant_names_the_test_that_breaks_it() -> None:
    section = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8").partition("\n## Invariants\n")[2]
    items = re.split(r"^(\d)\. ", section.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert items[::2] == [str(number) for number in range(1, 10)]
    assert all(re.search(r"checked in .+\n(?:.*\n)*?.*broken in `tests/[\w/]+\.py::\w+`", item) for item in items[1::2])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("inspect_partition")


def test_the_plan_that_the_readme_shows(example: ModuleType) -> None:
    layer, inputs = example.layer_and_inputs(num_tokens=8)
    printed = str(explain(layer, *inputs, options={"runner": "mrv2"})).splitlines()
    (excerpt,) = [code for language, code in FENCE.findall(README.read_text(encoding="utf-8")) if not language]
    assert [line for line in excerpt.splitlines() if line.strip() != "..." and line not in printed] == []


def test_the_picture_is_described_for_those_who_do_not_see_it(example: ModuleType) -> None:
    (words,) = re.findall(r'alt="([^"]+)"', README.read_text(encoding="utf-8"))
    plans = {plan.region: plan for plan in example.layer_plans().values()}
    counts = [(sum(len(p.ops) for p in plan.pieces), sum(len(r.ops) for r in plan.regions)) for plan in plans.values()]
    said = re.findall(r"replays (\d+)(?: of them in 2 pieces)? and launches (\d+)", words)
    assert said == [(str(captured), str(launched)) for captured, launched in counts]


def test_figures_of_the_readme_stand_in_the_benchmarks() -> None:
    section = README.read_text(encoding="utf-8").partition("\n## Measured\n")[2].partition("\n## ")[0]
    figures = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)", FENCE.sub("", section))
    kept = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert len(figures) > 4
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", kept)] == []


def test_bytes_of_a_token_and_of_a_page() -> None:
    rows = table_rows(README, "## Cache formats")
    words = [tuple(cell.strip('`"') for cell in row[:2]) for row in rows]
    configs = [make() for make in (DeepseekV4Config.flash, DeepseekV4Config.pro)]
    figures = [[bytes_per_token(config.with_cache_dtypes(*pair)) for config in configs] for pair in words]
    assert [[float(cell) for cell in row[2:]] for row in rows] == figures
    section = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("Pages are rounded up to")[2]
    printed = [
        [int(n) for n in re.findall(r"\d+", row)] for row in re.findall(r"^\| (?:sl|co|ke).*", section, re.MULTILINE)
    ]
    kinds = ((LayerKind.SWA, 0), (LayerKind.C4A, 1), (LayerKind.C128A, 1), (LayerKind.C4A, 3))
    for (kind, place), row in zip(kinds, printed, strict=True):
        specs = [layer_cache_specs(configs[0].with_cache_dtypes(*pair), kind)[place] for pair in words]
        assert row[-3:] == [spec.page_bytes(torch.bfloat16) for spec in specs]
        assert {spec.block_tokens for spec in specs} == {row[-4]}
