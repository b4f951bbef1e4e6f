"""A `torch.compile` backend that computes, proves and shows the eager holes of sparse attention.

Public surface; everything else is reached by its module path. Importing this package registers the `dsv4` ops
with torch and the name of the backend with Dynamo, and imports neither Dynamo nor Inductor nor transformers.
"""

from . import ops as ops
from .compat.backend_name import register_backend_name
from .counting import Counters as Counters
from .counting import counters as counters
from .decode import uniform_decode as uniform_decode
from .decode import uniform_query_len as uniform_query_len
from .inspect.explain import explain as explain
from .memory_pool import MemoryPool as MemoryPool
from .ops.registry import register_op as register_op
from .runtime.capture import capture as capture
from .runtime.engines.capture_state import is_capturing as is_capturing
from .version import __version__ as __version__

register_backend_name()
del register_backend_name
