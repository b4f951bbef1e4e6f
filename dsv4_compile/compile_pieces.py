"""Step 8 of the pipeline: give every part that differs from the others to the piece compiler, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .config import Config
from .draft import Draft
from .passes.find_copies import piece_key
from .piece_compilers import CompiledPart, compile_part, piece_compiler_for, traced_numbers

Functions = Mapping[str, tuple[CompiledPart | None, ...]]


def compile_pieces(draft: Draft, config: Config, example_inputs: Sequence[Any]) -> Functions:
    """The functions of the parts of each piece that is no copy; None for a part that runs as it is.

    Args:
        draft: the planned graph.
        config: the options.
        example_inputs: of the graph, as Dynamo handed them over.

    Raises:
        PieceCompileError: the compiler failed on a part.
    """
    compiler = piece_compiler_for(config, draft)
    if compiler is None:
        return {name: (None,) * len(parts) for name, parts in draft.parts.items()}
    numbers = traced_numbers(draft, example_inputs)
    known: dict[Any, CompiledPart] = {}
    functions: dict[str, tuple[CompiledPart | None, ...]] = {}
    for name, parts in draft.parts.items():
        compiled: list[CompiledPart | None] = []
        for part in parts:
            if part.uncompiled is not None:
                compiled.append(None)
                continue
            key = piece_key(draft, part.unit, numbers)
            if key not in known:
                known[key] = compile_part(draft, part.unit, compiler, numbers)
            compiled.append(known[key])
        functions[name] = tuple(compiled)
    return functions
