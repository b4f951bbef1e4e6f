"""The tensors that an op of vLLM finds through the forward context, given the name of its layer.

A step's metadata is a record with tensors, or records of them, of a class for each kind of attention; the slots are in
a table beside it. Both are told by the name of the layer, so that an error can say which one moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

DEPTH = 3  # records within records


def step_tensors(**arguments: object) -> dict[str, Tensor]:
    """What a call of an op would read now, by name; nothing outside of a step.

    Args:
        arguments: of the op, those that are no tensors.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return {}
    context = get_forward_context()
    found: dict[str, Tensor] = {}
    for layer in layer_names(arguments, context.no_compile_layers):
        for kind in ("attn_metadata", "slot_mapping"):
            for table in _tables(getattr(context, kind, None)):
                found.update(_tensors(table.get(layer), f"{kind} of {layer}", DEPTH))
    return found


def layer_names(arguments: Mapping[str, object], known: Mapping[str, object]) -> list[str]:
    """The names of layers among the arguments of an op, as texts."""
    texts = (value if isinstance(value, str) else str(getattr(value, "value", value)) for value in arguments.values())
    return [text for text in texts if text in known]


def _tables(given: object) -> Iterator[Mapping[str, object]]:
    """One table, or one for each half of a batch that is run in two."""
    for table in given if isinstance(given, list) else [given]:
        if isinstance(table, Mapping):
            yield table


def _tensors(value: object, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth and hasattr(value, "__dict__"):
        for attribute, inner in vars(value).items():
            yield from _tensors(inner, f"{attribute} in {name}", depth - 1)
