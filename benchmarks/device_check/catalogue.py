"""The sections in their order, the seconds that each may take, and the names by which they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

_SECTIONS = "benchmarks.device_check.sections"


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionSpec:
    """A section.

    Attributes:
        id: "S4".
        name: "launch".
        entry: what its process runs, as "module:function".
        box: seconds after which it is killed.
        least: it is not started with less time than that.
        about: one line for the list of time boxes.
    """

    id: str
    name: str
    entry: str
    box: float
    least: float
    about: str


def _section(number: int, name: str, box: float, least: float, about: str) -> SectionSpec:
    return SectionSpec(id=f"S{number}", name=name, entry=f"{_SECTIONS}.{name}:run", box=box, least=least, about=about)


SECTIONS = (
    _section(0, "facts", 60, 5, "versions, driver, clocks, tools, doctor"),
    _section(1, "contract", 100, 20, "the tests of the engine's contract; caches of compilers are filled beside them"),
    _section(2, "correct", 90, 20, "14 configurations against eager, while memory around them changes hands"),
    _section(3, "hazards", 60, 15, "what a review was afraid of, each in a process of its own"),
    _section(4, "launch", 60, 15, "a toy of 1, 11 and 61 layers: microseconds on the host, on the wall, on the GPU"),
    _section(5, "decode", 80, 20, "decode steps of 8 layers of the Flash model beside one full graph and others"),
    _section(6, "ttft", 60, 20, "prefills of the Flash model by region: time to the first token"),
    _section(7, "streams", 50, 15, "side streams by number, tokens, dims and compiler"),
    _section(8, "memory", 50, 15, "bytes of a captured size and of a graph, and what is given back"),
    _section(9, "capture", 60, 15, "seconds to capture 61 layers, by stage"),
    _section(10, "tools", 60, 15, "sanitizer, profiler, one trace"),
    _section(11, "ops", 90, 20, "kernels of the Flash model one by one, beside their rooflines and plain torch"),
)
