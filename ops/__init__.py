"""Custom ops of DeepSeek V4 attention in the namespace `dsv4`, and the registry of roles.

One op a file, read in one order: schema, reference implementation, definition. Importing the package defines all of
them and registers their roles.
"""

if __name__ != "dsv4_compile.ops":
    # A second copy under another name would define every op of the library twice.
    raise ImportError("import this package as dsv4_compile.ops, not as ops")

from . import compress_kv_insert as compress_kv_insert
from . import forward_mqa as forward_mqa
from . import fused_q_kv_rmsnorm as fused_q_kv_rmsnorm
from . import indexer_q_rope as indexer_q_rope
from . import inverse_rope as inverse_rope
from . import qnorm_rope_kv_insert as qnorm_rope_kv_insert
from . import sparse_indexer as sparse_indexer
