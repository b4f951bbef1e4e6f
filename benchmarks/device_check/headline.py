"""The figures that the day is about, each picked out of the rows of one section; None where it was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .rows import Row, Value

Rows = Mapping[str, Sequence[Row]]
CONFIGURATIONS = 14
DECODE_TOKENS, PROMPT = 8, 512  # the decode step and the prompt that stand for the others
PUBLISHED_TTFT = "-53.7 % (range in public reports: -27 to -54 %)"  # narrow beside wide, vLLM #45309, #51430
DECODE = {
    "ours": "mrv2 narrow",
    "full_graph": "one full graph",
    "eager": "eager",
    "reduce_overhead": "reduce-overhead",
    "partitioned": "reduce-overhead, partitioned",
}


def headline_of(rows: Rows) -> dict[str, object]:
    """Figures a to i; every key is always there."""
    return {
        "a_correct": _correct(rows.get("S2", ())),
        "b_stable": _all_ok(rows.get("S2", ()), "stable"),
        "c_decode_us": {name: _decode(rows, config) for name, config in DECODE.items()},
        "d_host_us_per_piece": _number(rows.get("S4", ()), "host_us_per_piece", config="captured, inductor"),
        "e_ttft": _ttft(rows.get("S6", ())),
        "f_bytes_per_bucket": _number(rows.get("S8", ()), "bytes_per_bucket", pool="shared"),
        "f_bytes_per_graph": _number(rows.get("S8", ()), "bytes_per_graph", pool="shared"),
        "g_streams_ratio": _streams(rows.get("S7", ())),
        "h_inductor_ratio": _ratio(_decode(rows, "mrv2 narrow"), _decode(rows, "mrv2 narrow, eager pieces")),
        "i_capture_s_61": _number(rows.get("S9", ()), "seconds", stage="second call", layers=61),
    }


def select(rows: Sequence[Row], metric: str, **case: Value) -> list[Row]:
    """The rows of a metric whose case has these values."""
    return [
        row
        for row in rows
        if row.metric == metric and row.error is None and all(row.case.get(k) == v for k, v in case.items())
    ]


def _number(rows: Sequence[Row], metric: str, **case: Value) -> float | None:
    for row in select(rows, metric, **case):
        if isinstance(row.value, (int, float)) and not isinstance(row.value, bool):
            return float(row.value)
    return None


def _ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 4) if above is not None and below else None


def _correct(rows: Sequence[Row]) -> str | None:
    judged = [row for row in rows if row.metric == "correct"]
    return f"{sum(row.ok is True for row in judged)}/{CONFIGURATIONS}" if judged else None


def _all_ok(rows: Sequence[Row], metric: str) -> bool | None:
    judged = [row.ok for row in rows if row.metric == metric]
    return all(judged) if judged else None


def _decode(rows: Rows, config: str) -> float | None:
    return _number(
        rows.get("S5", ()), "wall_us", config=config, tokens=DECODE_TOKENS, hole="stand-in", inputs="in place"
    )


def _ttft(rows: Sequence[Row]) -> dict[str, object]:
    found = {
        config: _number(rows, "wall_us", config=config, tokens=PROMPT, runner="mrv2")
        for config in ("eager", "wide", "minimal", "narrow")
    }
    return {
        "narrow_of_wide": _ratio(found["narrow"], found["wide"]),
        "minimal_of_wide": _ratio(found["minimal"], found["wide"]),
        "narrow_of_eager": _ratio(found["narrow"], found["eager"]),
        "published_narrow_of_wide": PUBLISHED_TTFT,
    }


def _streams(rows: Sequence[Row]) -> dict[str, float | None]:
    case: dict[str, Value] = {"dims": "flash", "compiler": "inductor", "tokens": DECODE_TOKENS}
    return {
        f"{count}_of_none": _number(rows, "of_no_side_stream", config=f"{count} side streams", **case)
        for count in (1, 2, 3)
    }
