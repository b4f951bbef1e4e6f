"""Every op of vLLM that reaches the forward context is found by the rule, as this release has them.

The sources are read, not imported: most of them are for other devices. A function that an op is made of, and that calls
for the forward context or for a layer by its name, must take the name of a layer in a way that the rule knows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dsv4_compile.integrations.vllm.roles import LAYER_ARGUMENTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
# How this release finds what belongs to the step.
WAYS_IN = ("forward_context", "get_attention_context", "get_layer_from_name")
# Annotations that become an object opaque to torch in the schema of an op.
OPAQUE_TYPES = ("LayerName", "LayerNameType")


def name_of(call: ast.expr) -> str:
    return call.id if isinstance(call, ast.Name) else getattr(call, "attr", "")


def calls_in(function: ast.FunctionDef) -> set[str]:
    return {name_of(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}


def reaches_context(name: str, functions: dict[str, ast.FunctionDef], seen: frozenset[str] = frozenset()) -> bool:
    if name not in functions or name in seen:
        return any(way in name for way in WAYS_IN)
    return any(reaches_context(inner, functions, seen | {name}) for inner in calls_in(functions[name]))


def names_layer(function: ast.FunctionDef) -> bool:
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    annotations = (ast.unparse(given.annotation) if given.annotation else "" for given in arguments)
    return any(given.arg in LAYER_ARGUMENTS for given in arguments) or any(a in OPAQUE_TYPES for a in annotations)


def context_ops(text: str) -> Iterator[tuple[str, bool]]:
    """Names of the ops that a source registers and that reach the context, and whether the rule would find them."""
    tree = ast.parse(text)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) == "direct_register_custom_op":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            op, body = (*node.args, given.get("op_name"))[0], (*node.args[1:], given.get("op_func"))[0]
            function = name_of(body) if body is not None else ""
            if isinstance(op, ast.Constant) and reaches_context(function, functions):
                yield f"vllm::{op.value}", function in functions and names_layer(functions[function])


def test_every_op_that_reaches_the_context_takes_the_name_of_a_layer() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, bool] = {}
    for path in Path(spec.origin).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found.update(context_ops(text) if "direct_register_custom_op" in text else ())
    assert {"vllm::unified_attention_with_output", "vllm::unified_kv_cache_update", "vllm::moe_forward"} <= set(found)
    assert [op for op, is_found in found.items() if not is_found] == []


def test_an_op_that_hides_its_layer_is_noticed() -> None:
    hidden = """
def _find():
    return get_forward_context()
def attend(q, index: int):
    return _find()[index]
direct_register_custom_op(op_name="attend", op_func=attend)
"""
    assert list(context_ops(hidden)) == [("vllm::attend", False)]
    assert list(context_ops(hidden.replace("index: int", "layer_name: str"))) == [("vllm::attend", True)]
