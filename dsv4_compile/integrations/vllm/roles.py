"""Which ops of vLLM reach what belongs to the step: the forward context, a global that no schema shows.

The rule: an op of vLLM that takes the name of a layer looks that layer up in the forward context, and finds the
metadata of the step, the slots and the cache beside it. The name is an object opaque to torch, or a text in an argument
that is called so. vLLM's own list of ops to split at does not have all of them, and changes; the rule needs no list.

What the rule finds becomes a split op, whatever its schema says: the update of the KV cache returns an empty tensor and
declares no write. Mixture-of-experts layers take a name too, find nothing but their weights by it, and are captured by
vLLM as well. With data parallelism they also read how many tokens the other ranks have, which changes from step to
step.

A role that somebody has given before stays: who registers an op as `prepare` says that it may be captured where the
runner keeps its metadata in place, and `step_metadata` checks that in every call.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...compat.dispatch import all_op_names, schemas_of
from ...ops.registry import find_op, register_op, snapshot
from .step_metadata import step_tensors

NAMESPACE = "vllm::"
# They find their weights by the name of the layer, and nothing else unless there is data parallelism.
EXPERTS = frozenset(["vllm::moe_forward", "vllm::moe_forward_shared"])
# What an argument is called that names a layer, where it is a text.
LAYER_ARGUMENTS = frozenset(["layer_name", "k_cache_prefix"])
# How a schema tells the type of an object opaque to torch.
OPAQUE = "PyObject"


def register_roles(*, data_parallel: bool) -> None:
    """Give the ops that are defined by now their roles; those of a model are, once it is traced.

    Args:
        data_parallel: several ranks serve batches of their own.
    """
    known = snapshot()
    for name in context_readers():
        given = find_op(known, name)
        if given is not None and given.role == "prepare" and given.reads_context and given.context is None:
            register_op(name, role="prepare", step_state=given.step_state, reads_context=True, context=step_tensors)
        elif given is None:
            is_captured = name in EXPERTS and not data_parallel
            register_op(name, role="capture" if is_captured else "split", reads_context=not is_captured)


def context_readers() -> list[str]:
    """The ops of vLLM that take the name of a layer, by name."""
    names = {name.partition(".")[0] for name in all_op_names() if name.startswith(NAMESPACE)}
    return sorted(name for name in names if layer_arguments(name))


def layer_arguments(op: str) -> list[str]:
    """The arguments of an op, "ns::op" or "ns::op.overload", that name a layer."""
    arguments: Iterable[tuple[str, str]] = (
        (given.name, str(given.type)) for schema in schemas_of(op) for given in schema.arguments
    )
    return [name for name, kind in arguments if kind == OPAQUE or name in LAYER_ARGUMENTS]
