"""Every private torch name this package relies on, in one place (torch 2.11 to 2.14).

Nothing here may import Dynamo or Inductor at module level: `dsv4_compile` is imported before they are needed.
"""

from __future__ import annotations

import torch


def all_op_names() -> list[str]:
    """Every op torch knows, as "ns::op" or "ns::op.overload"."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def schemas_of(name: str) -> list[torch._C.FunctionSchema]:
    """The schemas of all overloads of "ns::op", or of the one overload "ns::op.overload"; empty if unknown."""
    packet, _, overload = name.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(packet)
    if not overload:
        return list(schemas)
    wanted = "" if overload == "default" else overload
    return [schema for schema in schemas if schema.overload_name == wanted]
