"""The HTML report of a dump folder: what is on the page, whatever is in the dump, and one-line errors."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_ops  # noqa: F401  defines the ops
from layer_plans import layer_plan
from torch import Tensor

from dsv4_compile.inspect.cli import main
from dsv4_compile.inspect.plan import Plan, PlanOp, PlanSlot, PlanUnit, PlanValue, PlanWorkspace
from dsv4_compile.inspect.report.dump_folder import DumpedGraph, Stage, plan_from_json, read_dump
from dsv4_compile.inspect.report.page import DIFF_LINES, PROGRAMS, readable_bytes, render_report

VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Elements as (tag, attributes, text), and a check that every tag is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.elements[index][2].append(data)

    def of_class(self, name: str) -> list[tuple[dict[str, str], str]]:
        return [(attrs, "".join(text)) for _, attrs, text in self.elements if name in attrs.get("class", "").split()]

    def by_id(self, name: str) -> str:
        (text,) = ["".join(text) for _, attrs, text in self.elements if attrs.get("id") == name]
        return text

    def ids(self) -> list[str]:
        return [attrs["id"] for _, attrs, _ in self.elements if "id" in attrs]


def layer(x: Tensor) -> Tensor:
    return torch.ops.toy.fresh(x + 1) * 2


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of a small function after a capture."""
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("dump")
    options: dict[str, Any] = {"split_ops": ["toy::fresh"], "dump_dir": str(folder)}
    compiled = torch.compile(layer, backend="dsv4_piecewise", dynamic=True, options=options)
    for _ in range(3):
        compiled(torch.ones(5, 4))
    return folder


def value(name: str, origin: str = "activation") -> PlanValue:
    return PlanValue(name=name, layout="[s0, 64] float32", origin=origin)


def plan_of(units: tuple[PlanUnit, ...], inputs: tuple[PlanValue, ...] = (), slots: tuple[PlanSlot, ...] = ()) -> Plan:
    return Plan(
        runner="mrv1",
        runner_reason="asked for",
        region="wide",
        tokens="s0",
        sizes=(("s0", "x.size()[0]"),),
        scalars=(),
        units=units,
        inputs=inputs,
        traced_sizes=(("s0", 16),),
        workspace=PlanWorkspace(slots=slots, planned=4096, lower_bound=4096, unshared=8192),
        notes=(),
    )


def graph_of(plan: Plan, **parts: Any) -> DumpedGraph:
    empty: dict[str, Any] = {"stages": (), "unit_code": {}, "programs": ()}
    return DumpedGraph(name="graph_0", plan=plan, **{**empty, **parts})


def region(name: str, ops: tuple[PlanOp, ...]) -> PlanUnit:
    return PlanUnit(kind="region", name=name, ops=ops, inputs=(), outputs=(value("out"),), duplicate_of=None)


def big_plan(layers: int) -> Plan:
    """A piece of 15 ops and a region of 2 for each layer, all pieces but the first alike."""
    units = []
    for n in range(layers):
        weights = [f"layers.{n}.attention.projection_{index}.weight" for index in range(15)]
        ops = [
            PlanOp(
                node=f"linear_{n}",
                op=f"linear[{weight}]",
                reason=None,
                line=f"/home/me/model.py:{n} in forward: y",
                weight=weight,
            )
            for weight in weights
        ]
        piece = PlanUnit(
            kind="piece",
            name=f"piece_{n}",
            ops=tuple(ops),
            inputs=tuple(value(weight, "weight") for weight in weights),
            outputs=(value(f"q_{n}"),),
            duplicate_of="piece_1" if n > 1 else None,
        )
        eager = [PlanOp(node=op, op=f"dsv4::{op}", reason="split op", line="") for op in ("indexer", "mqa")]
        units += [piece, region(f"region_{n}", tuple(eager))]
    inputs = tuple(taken for unit in units for taken in unit.inputs)
    slots = tuple(
        PlanSlot(name=f"q_{n}", offset=2048 * (n % 2), nbytes=2048, first=f"piece_{n}", last=f"region_{n}")
        for n in range(layers)
    )
    return plan_of(tuple(units), inputs, slots)


def big_stages(lines: int) -> Iterator[Stage]:
    """Fourteen stages of many long lines; the third pass changes half of them."""
    for index in range(14):
        body = [f"        a_{n} = op({'L_self_modules_w_, ' * 8}{index > 2 and n % 2})" for n in range(lines)]
        yield Stage(file=f"{index:02d}_s.py", name=f"s{index}", nodes=lines, delta=0, code="\n".join(body))


def test_command_writes_the_page(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert main(["report", str(dump), "--output", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    page = Page(target.read_text(encoding="utf-8"))
    parts = ["timeline", "workspace", "inputs", "code", "piece_0", "region_0", "piece_1", "passes", "programs"]
    assert page.ids() == ["graph_0", *(f"graph_0-{part}" for part in parts), "detail"]
    assert "torch.ops.toy.fresh" in page.by_id("graph_0-region_0")
    assert "program_5_4.py" in page.by_id("graph_0")
    assert main(["report", str(dump / "graph_0"), "--output", str(tmp_path / "same.html")]) == 0
    assert (tmp_path / "same.html").read_text(encoding="utf-8") == target.read_text(encoding="utf-8")


def test_compiling_writes_the_page_and_the_command_adds_the_captures(dump: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dump / "graph_0", tmp_path / "graph_0")
    program = "program_5_4.py"
    assert program not in Page((folder / "report.html").read_text(encoding="utf-8")).by_id("graph_0")
    assert main(["report", str(folder)]) == 0
    assert program in Page((folder / "report.html").read_text(encoding="utf-8")).by_id("graph_0")


def test_every_op_and_value_has_a_mark_that_says_what_it_is(dump: Path) -> None:
    (graph,) = read_dump(dump)
    page = Page(render_report([graph]))
    details = [attrs["title"] for attrs, _ in page.of_class("cell")]
    assert len(details) == sum(len(unit.ops) for unit in graph.plan.units)
    assert [detail for detail in details if "eager" in detail] == [details[1]]
    assert re.fullmatch(r"toy::fresh — eager, because: split op — test_page\.py:\d+ in layer: return .*", details[1])
    boxes = [attrs["title"].partition(":")[0] for attrs, _ in page.of_class("box")]
    assert len(boxes) == len(graph.plan.workspace.slots) > 1
    assert "x" in boxes  # by its name in the function, not by Dynamo's


def test_nothing_is_loaded_from_elsewhere(dump: Path) -> None:
    text = render_report(read_dump(dump))
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _, _ in page.elements}
    assert not [attrs for _, attrs, _ in page.elements if "src" in attrs or "onclick" in attrs]
    links = [attrs["href"] for tag, attrs, _ in page.elements if tag == "a"]
    assert links
    assert {link.removeprefix("#") for link in links} <= set(page.ids())
    assert not re.search(r"@import|url\(|https?:", text)
    assert "default-src 'none'" in text


def test_passes_say_what_they_are_for_and_what_they_changed(dump: Path) -> None:
    (graph,) = read_dump(dump)
    text = Page(render_report([graph])).by_id("graph_0")
    for stage in graph.stages[1:]:
        assert stage.name in text
    assert "Decide which nodes run eagerly, and say why for each." in text
    first, second = graph.stages[:2]
    changed = dataclasses.replace(second, code=second.code.replace("fresh", "stale"), nodes=9, delta=-2)
    page = Page(render_report([dataclasses.replace(graph, stages=(first, changed))]))
    assert f"{second.name}9 nodes (-2), changed" in page.by_id("graph_0")
    assert any("toy.fresh" in text for _, text in page.of_class("minus"))
    assert any("toy.stale" in text for _, text in page.of_class("plus"))


def test_parts_and_streams_of_a_compiled_piece() -> None:
    graph = graph_of(layer_plan(4, "narrow", piece_compiler="aot_eager", aux_streams=3))
    page = Page(render_report([graph]))
    piece = page.by_id("graph_0-piece_0")
    assert "It runs on 4 streams." in piece
    assert "left alone: calls dsv4::fused_q_kv_rmsnorm" in piece
    assert "compiled by aot_eager" in piece
    details = [attrs["title"] for attrs, _ in page.of_class("cell")]
    streams = [detail.partition("stream ")[2][:1] for detail in details if "stream " in detail]
    assert {stream: streams.count(stream) for stream in "123"} == {"1": 3, "2": 2, "3": 2}
    assert plan_from_json(graph.plan.to_json()) == graph.plan


def test_hostile_names_stay_text() -> None:
    evil = '</pre><script>alert("1")</script>\'"&{{ 7 * 7 }}'
    op = PlanOp(node=evil, op=f"{evil}::op", reason=evil, line=f"{evil}:1 in f: {evil}")
    slot = PlanSlot(name=evil, offset=0, nbytes=4096, first="start", last="end")
    plan = dataclasses.replace(
        plan_of((region("region_0", (op,)),), (value(evil, "user input"), value("y", evil)), (slot,)),
        notes=(evil,),
        scalars=(evil,),
        sizes=((evil, evil),),
        region=evil,
    )
    stage = Stage(file=evil, name=evil, nodes=1, delta=0, code=evil)
    parts = {
        "stages": (stage, dataclasses.replace(stage, code="")),
        "unit_code": {"region_0": evil},
        "programs": ((evil, evil),),
    }
    page = Page(render_report([graph_of(plan, **parts)]))
    assert [tag for tag, _, _ in page.elements].count("script") == 1
    (cell,) = [attrs for attrs, _ in page.of_class("cell")]
    assert set(cell) == {"class", "tabindex", "title"}
    assert evil in cell["title"]
    assert evil in page.by_id("graph_0-region_0")
    assert any(text == f"-{evil}" for _, text in page.of_class("minus"))


def test_a_model_of_61_layers_stays_readable() -> None:
    plan = big_plan(61)
    code = {f"region_{n}": f"def forward(self, q_{n}):\n    # layer {n}\n    mqa = op(q_{n}, 4)" for n in range(61)}
    code["region_7"] = code["region_7"].replace("4", "128")
    programs = tuple((f"program_{n}.py", "x = 1\n" * 5000) for n in range(20))
    graph = graph_of(plan, stages=tuple(big_stages(5000)), unit_code=code, programs=programs)
    text = render_report([graph])
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    rows = [text.split()[:2] for _, text in page.of_class("row")]
    assert rows == [["layer", str(n)] for n in range(61)]
    shown = [name for name in page.ids() if re.search(r"-(piece|region)_", name)]
    assert shown == ["graph_0-piece_0", "graph_0-region_0", "graph_0-piece_1", "graph_0-region_7"]
    assert "same work: piece_2, piece_3" in page.by_id("graph_0-piece_1")
    assert "layers.N.attention.projection_3.weight" in text
    assert "more lines: the whole text is in 03_s.py" in page.by_id("graph_0")
    assert text.count('class="plus"') + text.count('class="minus"') <= DIFF_LINES
    assert f"{20 - PROGRAMS} more in the folder" in text


def test_places_on_the_workspace_map() -> None:
    page = Page(render_report([graph_of(big_plan(2))]))
    boxes = [attrs["style"] for attrs, _ in page.of_class("box")]
    # six columns: start, four units, end; a value lives in two of them and takes half of the bytes
    assert boxes[0].startswith("left: 16.667%; top: 0.0%; width: 33.333%; height: 50.0%;")
    assert boxes[1].startswith("left: 50.0%; top: 50.0%; width: 33.333%; height: 50.0%;")
    ((_, axis),) = page.of_class("axis")
    assert re.findall(r"start|end|[a-z]+_\d", axis) == ["start", "piece_0", "region_0", "piece_1", "region_1", "end"]


def test_axis_of_many_units_names_few() -> None:
    ((_, axis),) = Page(render_report([graph_of(big_plan(61))])).of_class("axis")
    assert re.findall(r"[a-z]+_\d+", axis)[:3] == ["piece_0", "region_4", "piece_9"]  # every ninth of 122
    assert len(re.findall(r"[a-z]+_\d+", axis)) == 14


def test_a_plan_without_units_and_a_dump_without_code() -> None:
    assert "no workspace is needed" in render_report([graph_of(plan_of(()))])
    op = PlanOp(node="f", op="f", reason="split op", line="")
    page = Page(render_report([graph_of(plan_of((region("region_0", (op,)),)))]))
    assert "The dump has no code for it." in page.by_id("graph_0-region_0")
    assert "the whole graph" in next(text for _, text in page.of_class("row"))


def test_plan_round_trip() -> None:
    plan = big_plan(3)
    assert plan_from_json(plan.to_json()) == plan


def test_graphs_come_by_number_and_failed_ones_are_left_out(dump: Path, tmp_path: Path) -> None:
    for name in ("graph_10", "graph_2", "graph_3"):
        shutil.copytree(dump / "graph_0", tmp_path / name)
    (tmp_path / "graph_3" / "plan.json").unlink()
    assert [graph.name for graph in read_dump(tmp_path)] == ["graph_2", "graph_10"]
    page = Page(render_report(read_dump(tmp_path)))
    assert {"graph_2-piece_0", "graph_10-piece_0"} < set(page.ids())
    assert len(page.ids()) == len(set(page.ids()))


def test_json_has_what_the_page_shows(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in (dump / "graph_0").iterdir())
    assert main(["report", str(dump), "--json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    folder = Path(graph["folder"])
    assert (graph["name"], folder) == ("graph_0", dump / "graph_0")
    assert graph["plan"] == json.loads((folder / "plan.json").read_text())
    units = [unit["name"] for unit in graph["plan"]["units"]]
    assert units == ["piece_0", "region_0", "piece_1"]
    assert graph["timeline"] == [{"layer": "the whole graph", "units": [{"name": name, "ops": 1} for name in units]}]
    assert [graph["code"][name] for name in units] == ["piece_0.py", "region_0.py", "piece_1.py"]
    assert graph["programs"] == ["program_5_4.py"]
    stages = read_dump(dump)[0].stages
    assert [(one["name"], one["nodes"], one["delta"]) for one in graph["passes"]] == [
        (stage.name, stage.nodes, stage.delta) for stage in stages[1:]
    ]
    assert [one["changed"] for one in graph["passes"]] == [
        old.code != new.code for old, new in itertools.pairwise(stages)
    ]
    files = [*graph["code"].values(), *graph["programs"], *(one["file"] for one in graph["passes"])]
    assert all((folder / file).is_file() for file in files)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not (dump / "report.html").exists()


def test_json_of_one_graph_and_of_several(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("graph_10", "graph_2"):
        shutil.copytree(dump / "graph_0", tmp_path / name)
    assert main(["report", str(tmp_path), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["graphs"]
    assert [Path(graph["folder"]) for graph in both] == [tmp_path / "graph_2", tmp_path / "graph_10"]
    assert main(["report", str(tmp_path / "graph_10"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"] == both[1:]


def test_json_and_a_page_at_once_make_no_sense(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", str(dump), "--json", "--output", "page.html"])
    assert stop.value.code == 2
    assert "argument --output: not allowed with argument --json" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_reader_that_stops_early_gets_no_traceback(dump: Path) -> None:
    command = f"{sys.executable} -m dsv4_compile report {dump} --json | true"  # gone before the answer comes
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    errors = []
    for form in ([], ["--json"]) if "--output" not in arguments else ([],):
        assert main(["report", *arguments, *form]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        errors.append(printed.err)
    assert len(set(errors)) == 1
    return errors[0]


def test_what_is_no_dump_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a folder: give the one named by the option dump_dir" in refused([str(tmp_path / "no")], capsys)
    assert "is not a dump: it has no plan.json and no graph_<n>" in refused([str(tmp_path)], capsys)
    (tmp_path / "graph_0").mkdir()
    assert "compiling stopped before there was a plan" in refused([str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is no plan of this version: Expecting property name"),
        ("[]", "is no plan of this version: Plan is not an object"),
        ('{"units": []}', "Plan has no runner"),
        ("\udcff", "is no plan of this version"),
        (json.dumps({**big_plan(1).to_dict(), "units": 3}), "is no plan of this version"),
        (json.dumps({**big_plan(1).to_dict(), "sizes": [["s0"]]}), "is no plan of this version"),
    ],
)
def test_a_broken_plan_is_refused_in_one_line(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode(errors="surrogateescape"))
    assert complaint in refused([str(tmp_path)], capsys)


def test_a_page_that_cannot_be_written_is_refused(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused([str(dump), "--output", str(dump / "no" / "page.html")], capsys)
    assert "No such file or directory; give another file with --output" in error


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_readable_bytes(count: int, text: str) -> None:
    assert readable_bytes(count) == text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not on this machine")
def test_a_browser_opens_what_the_address_names_and_tells_what_one_points_at(dump: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    pointing = "document.querySelector('.region .cell').dispatchEvent(new Event('mouseover', {bubbles: true}))"
    target.write_text(f"{render_report(read_dump(dump))}<script>{pointing}</script>", encoding="utf-8")
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    flags += " disable-component-update disable-sync dump-dom"
    command = ["chromium", *(f"--{flag}" for flag in flags.split()), f"--user-data-dir={tmp_path / 'profile'}"]
    address = f"{target.as_uri()}#graph_0-region_0"
    document = subprocess.run([*command, address], capture_output=True, text=True, check=True).stdout
    page = Page(document)
    opened = [attrs["id"] for tag, attrs, _ in page.elements if tag == "details" and "open" in attrs]
    assert opened == ["graph_0-region_0"]
    assert page.by_id("detail").startswith("toy::fresh — eager, because: split op — test_page.py:")
