"""The op library `dsv4` and the one way its ops are defined.

Every op writes into buffers of its caller and returns nothing, so that its outputs have stable addresses in a
captured graph. `Library.define` and `impl` cost about a quarter per call of what `torch.library.custom_op` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import registry
from .kernels import serve
from .registry import Capturable, RegisteredOp, Role

_library = torch.library.Library("dsv4", "DEF")


def define_op(
    schema: str,
    implementation: Callable[..., None],
    *,
    role: Role,
    step_state: Sequence[str] = (),
    tokens: str | None = None,
    kernels_capturable: Capturable = "never",
) -> None:
    """Define an op that returns nothing, implement it for every device, and register its role.

    On GPUs its kernel file (`kernels/<name>.py`) serves what fits it.

    Args:
        schema: "name(arguments) -> ()" with every written argument marked.
        implementation: plain torch, any device.
        role: "split", "prepare" or "capture".
        step_state: arguments that are step state.
        tokens: the argument whose dim 0 is the token count.
        kernels_capturable: of a split op, in which batches its kernels may be captured; in torch it never may.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    serve.register(_library, name, implementation)
    torch.library.register_fake(f"dsv4::{name}", _fake, lib=_library)
    # not register_op: it imports the error catalogue, and with it Dynamo; tests check these names instead
    registry._registered[f"dsv4::{name}"] = RegisteredOp(
        f"dsv4::{name}",
        role,
        tuple(step_state),
        tokens=tokens,
        capturable=serve.promise(kernels_capturable),
        why_not_kept=serve.why_torch(name) if kernels_capturable != "never" else None,
    )


def _fake(*arguments: object) -> None:
    """Nothing is returned and no metadata changes."""
