"""The proof behind the runner flag: under mrv1 no captured node may read step state or the step context.

That runner makes new step-state tensors every step and may have no step context at capture, so a captured reader
would replay the capture's branch and addresses for ever: garbage without an error. The region policy is an
instruction; this check runs whatever the policy was.

Whatever the runner, no captured node may call an op of which nobody knows what it reads: one that takes an object
opaque to torch (the name of a layer, by which serving engines look up what belongs to the step) and has no role.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ..analysis.eager_reasons import step_state_name
from ..errors import HazardError
from ..graph.source_lines import where
from ..graph.traced import Provenance, TracedGraph
from ..ops.registry import find_op

_ROLES = (
    'give it a role: register_op(name, role="split", reads_context=True), or role="capture" if it reaches nothing '
    "that changes from call to call. For vLLM's, --additional-config '{\"dsv4_compile\": {}}' does (docs/vllm.md)"
)
_CURE = 'use region="wide" or "minimal", or runner="mrv2" if the runner keeps its step state in persistent buffers'


def check_hazards(traced: TracedGraph, *, runner: str) -> TracedGraph:
    """Return the traced as it is.

    Raises:
        HazardError: a captured node reads what the runner replaces, or may do so; names op, argument, input and source
            line.
    """
    for node in traced.compute_nodes():
        for op in traced.effects[node].unknown_reach:
            if node not in traced.eager:
                raise HazardError(
                    f"op {op} takes an object through which it may read anything, also what belongs to the step, but "
                    f"it would be captured, at {where(node)}: {_ROLES}"
                )
    if runner == "mrv1":
        for node in traced.compute_nodes():
            if node not in traced.eager:
                for hazard in hazards_of(traced, node):
                    raise HazardError(f"{hazard}, but it would be captured under mrv1, at {where(node)}: {_CURE}")
    return traced


def hazards_of(traced: TracedGraph, node: fx.Node) -> Iterator[str]:
    """What a node reads of that which the old runner replaces."""
    effects = traced.effects[node]
    for access in effects.accesses:
        if access.step_state or traced.storages.get(access.storage) is Provenance.STEP_STATE:
            name = step_state_name(traced, access)
            yield f"op {access.op} reads the step state {name} through its argument {access.argument!r}"
    for op in effects.ops:
        registered = find_op(traced.ops, op)
        if registered and registered.reads_context:
            yield f"op {op} reads the step context (registered with reads_context=True)"
