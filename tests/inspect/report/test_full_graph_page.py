"""The report of a graph that has a plan of the whole step for uniform decode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decode_ops import DecodeTrial, register

from dsv4_compile.inspect.cli import main
from dsv4_compile.inspect.report.dump_folder import read_dump
from dsv4_compile.inspect.report.page import render_report


def test_page_and_json_show_both_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register()
    trial = DecodeTrial(2, dump_dir=str(tmp_path))
    for query_len in (1, None):
        trial.times(2, 4, query_len)
    (graph,) = read_dump(tmp_path)
    assert graph.plan.full is not None
    assert "attend" in graph.unit_code["whole_step"]
    page = render_report([graph])
    assert '<a href="#graph_0-whole_step">whole_step</a>, of 12 operations, nothing eager' in page
    assert 'id="graph_0-whole_step"' in page
    assert "captured in uniform decode, 12 operations" in page
    assert "program_full_4_" in page
    assert main(["report", str(tmp_path), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["graphs"]
    assert shown["code"]["whole_step"] == "whole_step.py"
    assert shown["plan"]["full"]["unit"]["name"] == "whole_step"
    assert any(name.startswith("program_full_4_") for name in shown["programs"])
