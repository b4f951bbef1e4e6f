"""Where in the user's source a node comes from."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(\S[^\n]*)')


def where(node: fx.Node) -> str:
    """ "model.py:41 in forward: attn(q, out)", the innermost user frame; says so if Dynamo kept none."""
    frames = _FRAME.findall(node.stack_trace or "")
    if not frames:
        return "no source line known"
    path, line, function, code = frames[-1]
    return f"{path}:{line} in {function}: {code}"
