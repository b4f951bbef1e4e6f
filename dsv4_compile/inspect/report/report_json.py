"""What the report shows, for programs: `report DIR --json`.

    {"graphs": [{
        "name": "graph_0",
        "folder": "dump/graph_0",          the files named below are in it
        "plan": {...},                     units, inputs, workspace and notes: the fields of `Plan`
        "timeline": [{"layer": "layer 0", "units": [{"name": "piece_0", "ops": 9}, ...]}, ...],
        "passes": [{"name": "choose_regions", "file": "07_choose_regions.py", "nodes": 61, "delta": 0,
                    "changed": false}, ...],
        "code": {"piece_0": "piece_0.py", ...},
        "programs": ["program_16.py", ...]
    }, ...]}

Code is named, not quoted: it is in the dump already.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from .dump_folder import DumpedGraph, read_dump
from .views import timeline


def report_json(folder: Path) -> str:
    """The content of the report of a dump folder, or of one graph's folder in it, as JSON.

    Raises:
        ExplainError: there is no dump there.
    """
    graphs = read_dump(folder)
    is_graph = (folder / "plan.json").is_file()
    return json.dumps(
        {"graphs": [_content(graph, folder if is_graph else folder / graph.name) for graph in graphs]}, indent=2
    )


def _content(graph: DumpedGraph, folder: Path) -> dict[str, object]:
    return {
        "name": graph.name,
        "folder": str(folder),
        "plan": graph.plan.to_dict(),
        "timeline": [
            {"layer": row.label, "units": [{"name": block.unit.name, "ops": len(block.cells)} for block in row.units]}
            for row in timeline(graph.plan)
        ],
        "passes": [
            {
                "name": after.name,
                "file": after.file,
                "nodes": after.nodes,
                "delta": after.delta,
                "changed": before.code != after.code,
            }
            for before, after in itertools.pairwise(graph.stages)
        ],
        "code": {unit.name: f"{unit.name}.py" for unit in graph.plan.all_units if unit.name in graph.unit_code},
        "programs": [file for file, _ in graph.programs],
    }
