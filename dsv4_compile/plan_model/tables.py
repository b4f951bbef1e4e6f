"""The tables of a `ModelPlan`, once: as text for the terminal and the docs, and as cells for the page."""

from __future__ import annotations

from dataclasses import dataclass

from ..inspect.report.page import readable_bytes
from ..log import pluralize
from .figures import ModelPlan

STEP = ("tokens", "ops by hand", "graph launches", "copies", "host time (ms)", "capture (s, estimate)")
MEMORY = (
    "tokens",
    "workspace",
    "lower bound",
    "unshared",
    "of it outputs",
    "eager ops",
    "pool (estimate)",
    "graphs (estimate)",
)
CACHES = ("kv_cache_dtype", "index_cache_dtype", "bytes a token", "windows and states", "tokens of context")
ROOM = ("on the GPU", "bytes", "")


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells under column names, after a sentence.

    Attributes:
        title: what the table is of.
        said: what has to be known to read it.
        columns, rows: the cells; a column of figures is set to the right.
    """

    title: str
    said: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = (self.columns, *self.rows)
        widths = [max(3, *(len(line[place]) for line in lines)) for place in range(len(self.columns))]
        right = [self.is_figures(place) for place in range(len(self.columns))]
        rule = [f"{'-' * (width - 1)}{':' if is_right else '-'}" for width, is_right in zip(widths, right, strict=True)]
        texts = [
            " | ".join(
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(cells, widths, right, strict=True)
            )
            for cells in (self.columns, rule, *self.rows)
        ]
        return "\n".join(f"| {text} |" for text in texts)

    def is_figures(self, place: int) -> bool:
        """Whether a column holds figures alone."""
        return all(row[place].replace(".", "", 1).isdecimal() for row in self.rows)


def headline(plan: ModelPlan) -> str:
    """What was planned."""
    return (
        f"{plan.model}: {pluralize(plan.layers, 'attention layer')}, {plan.parameters / 1e9:.2f} billion parameters "
        f"(embedding and head included, experts not), {plan.dtype}; runner {plan.runner} ({plan.runner_reason}), "
        f"region {plan.region}"
    )


def tables_of(plan: ModelPlan) -> tuple[TextTable, ...]:
    """All of them, in order."""
    return (step_table(plan), memory_table(plan), room_table(plan), cache_table(plan))


def step_table(plan: ModelPlan) -> TextTable:
    """Launches and time of the host, by token count."""
    step, engine = plan.launches, plan.engine
    host = f"{plan.step_us / 1e3:.3f}"
    counts = (str(step.by_hand), str(step.graphs), str(step.copies), host)
    return TextTable(
        "A step",
        f"{pluralize(step.graphs, 'piece')}, of which {step.duplicates} are duplicates, hold "
        f"{pluralize(step.captured_ops, 'op')}. An op by hand is at least one launch; the host time is {step.total} "
        f"launches at {plan.launch_us:g} us each, which was given. Capture times are estimates, from "
        f"{engine.seconds_an_op * 1e6:.0f} us an op: {_source(plan)}.",
        STEP,
        tuple((str(one.tokens), *counts, f"{one.seconds:.3f}") for one in plan.estimates),
    )


def memory_table(plan: ModelPlan) -> TextTable:
    """Workspace and captured memory, by token count."""
    engine = plan.engine
    rows = (
        (
            bucket.tokens,
            bucket.workspace,
            bucket.lower_bound,
            bucket.unshared,
            bucket.outputs,
            bucket.eager,
            one.pool,
            one.graphs,
        )
        for bucket, one in zip(plan.buckets, plan.estimates, strict=True)
    )
    return TextTable(
        "Memory of a captured token count, in bytes",
        "Workspace, lower bound, unshared and eager ops are computed. Outputs are the logits of every token. Eager ops "
        "allocate no more than this at once, outside of the workspace, with the scratch that Triton kernels of the "
        "split ops are given on a GPU. The workspace of the largest token count serves all, and so does its pool; "
        "graphs are kept for each. Pool and graphs are estimates, from "
        f"{engine.pool_factor:.2f} bytes for each byte of results inside of a piece and {engine.bytes_an_op:.0f} bytes "
        f"an op: {_source(plan)}.",
        MEMORY,
        tuple(tuple(map(str, row)) for row in rows),
    )


def room_table(plan: ModelPlan) -> TextTable:
    """What a GPU holds beside the caches."""
    room = plan.room
    parts = (
        ("weights", room.weights, f"{room.parameters} parameters in {plan.weights_dtype}"),
        ("buffers", room.buffers, "RoPE tables, selected block ids"),
        ("workspace", room.workspace, "of the largest token count"),
        ("eager ops", room.eager, "at once, with scratch of kernels"),
        ("captured", room.captured, "estimate: the pool, and the graphs of all token counts"),
        (
            "left for caches" if room.left >= 0 else "missing",
            abs(room.left),
            "" if room.left >= 0 else "nothing is left",
        ),
    )
    return TextTable(
        f"A GPU of {readable_bytes(room.memory)}",
        "Not counted: what the device keeps for itself (context, libraries), whatever of the model is not in the "
        "parameters above, and calls that run uncaptured.",
        ROOM,
        tuple((name, str(nbytes), " ".join((readable_bytes(nbytes), said)).strip()) for name, nbytes, said in parts),
    )


def cache_table(plan: ModelPlan) -> TextTable:
    """What fits into the rest, by cache format."""
    rows = (
        (
            cache.kv_cache_dtype,
            cache.index_cache_dtype,
            f"{cache.bytes_a_token:g}",
            str(cache.of_requests),
            "without end" if cache.tokens is None else str(cache.tokens),
        )
        for cache in plan.room.caches
    )
    return TextTable(
        "Context that fits",
        f"Tokens of all requests together, after the windows and states that {pluralize(plan.requests, 'request')} "
        f"and a step of {plan.buckets[-1].tokens} tokens take at most.",
        CACHES,
        tuple(rows),
    )


def _source(plan: ModelPlan) -> str:
    engine = plan.engine
    return (
        f"measured in this run by capturing {pluralize(engine.pieces, 'piece')} ({pluralize(engine.ops, 'op')}) of a "
        f"tiny stack on the {engine.engine} engine, and no figure of a GPU"
    )
