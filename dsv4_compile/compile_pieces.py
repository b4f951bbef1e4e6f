"""Step 8 of the pipeline: give every part that differs from the others to the piece compiler, once."""

from __future__ import annotations

from collections.abc import Mapping

from .config import Config
from .draft import Draft
from .piece_compilers import CompiledPart, compile_part, piece_compiler_for

Functions = Mapping[str, tuple[CompiledPart | None, ...]]


def compile_pieces(draft: Draft, config: Config) -> Functions:
    """The functions of the parts of each piece that has parts; None for a part that runs as it is.

    Args:
        draft: the planned graph.
        config: the options.

    Raises:
        PieceCompileError: the compiler failed on a part.
    """
    compiler = piece_compiler_for(config, draft)
    compiled: dict[str, CompiledPart] = {}
    for part in (part for parts in draft.parts.values() for part in parts):
        if compiler is not None and part.uncompiled is None and part.copy_of is None:
            compiled[part.unit.name] = compile_part(draft, part, compiler)
    return {
        name: tuple(compiled.get(part.copy_of or part.unit.name) for part in parts)
        for name, parts in draft.parts.items()
    }
