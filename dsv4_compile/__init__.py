"""A `torch.compile` backend that computes, proves and shows the eager holes of sparse attention.

Public surface; everything else is reached by its module path. Importing this package registers the `dsv4` ops
with torch and imports neither Dynamo nor Inductor nor transformers.
"""

from . import ops as ops
from .counting import Counters as Counters
from .counting import counters as counters
from .inspect.explain import explain as explain
from .ops.registry import register_op as register_op
from .runtime.capture import capture as capture
from .runtime.engines.capture_state import is_capturing as is_capturing

__version__ = "0.1.0"
