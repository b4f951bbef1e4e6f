"""Where in the user's source a node comes from."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

_TORCH = os.path.dirname(torch.__file__) + os.sep

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(\S[^\n]*)')


def where(node: fx.Node) -> str:
    """ "model.py:41 in forward: attn(q, out)", the innermost user frame; says so if Dynamo kept none."""
    frames = _FRAME.findall(node.stack_trace or "")
    if not frames:
        return "no source line known"
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    path, line, function, code = (own or frames)[-1]
    return f"{path}:{line} in {function}: {code}"
