"""A model that transformers has spread over the processes of `torchrun`: how that is asked for, and what we can serve.

transformers shards experts, embedding and head by the plan of the model, and puts the collectives around their forward;
attention stays whole on every rank, since its one KV head has nothing to shard. We take that as it is and swap the
attention, so each rank keeps caches of its own and computes all of it. Nothing here shards anything.

| asked for | what becomes of it |
|---|---|
| `tp_plan` | each expert in slices, summed over the ranks |
| `distributed_config` with `ep_size` | whole experts on some ranks each, where their tokens are summed over the ranks |
| the same, with experts that exchange tokens | refused: how many tokens go where is known on the host alone |
| `fsdp_size`, `dp_replicate_size`, `pp_size` | refused: ranks would serve different batches, or parts of the layers |
| a rule of a plan for attention | refused: our layers read their weights whole |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Plan = str | Mapping[str, str]


def sharding_arguments(tp_plan: Plan | None, distributed_config: Any) -> dict[str, Any]:
    """What `from_pretrained` is called with, of this version of transformers.

    Args:
        tp_plan: "auto", or rules by parameter or module name.
        distributed_config: a `DistributedConfig` of transformers, or a dict of its fields.

    Raises:
        UnsupportedConfigError: both are given, or a kind of parallelism that we cannot serve.
    """
    if distributed_config is None:
        return {} if tp_plan is None else _of_plan(tp_plan)
    if tp_plan is not None:
        raise UnsupportedConfigError("give either tp_plan or distributed_config, which has a tp_plan of its own")
    for name in ("fsdp_size", "dp_replicate_size", "pp_size"):
        if (size := _field(distributed_config, name) or 1) != 1:
            raise UnsupportedConfigError(
                f"distributed_config has {name}={size}, which is not served: every rank runs all layers on the same "
                "batch; use tp_plan or ep_size, or a serving engine for more"
            )
    if (how := _field(distributed_config, "ep_implementation") or "auto") not in ("auto", "all_reduce"):
        raise UnsupportedConfigError(
            f"distributed_config has ep_implementation={how!r}, which is not served: how many tokens go to which rank "
            "is known on the host alone; 'all_reduce' is"
        )
    return {"distributed_config": distributed_config}


def _field(distributed_config: Any, name: str) -> Any:
    if isinstance(distributed_config, Mapping):
        return distributed_config.get(name)
    return getattr(distributed_config, name, None)


def _of_plan(tp_plan: Plan) -> dict[str, Any]:
    """A plan in the argument that takes it; newer versions of transformers warn of the other one."""
    from transformers.distributed import DistributedConfig

    given = tp_plan if isinstance(tp_plan, str) else dict(tp_plan)
    if any(field.name == "tp_plan" for field in fields(DistributedConfig)):
        return {"distributed_config": DistributedConfig(tp_plan=given)}
    return {"tp_plan": given}


@contextmanager
def refusing_of_shards(folder: Path, sharding: Mapping[str, Any]) -> Iterator[None]:
    """What transformers says of a plan, or of the number of processes, as an error of ours; without a plan, nothing.

    Raises:
        UnsupportedConfigError: it cannot shard the model so.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not sharding or not (isinstance(error, ValueError) or "parallel mesh" in str(error)):
            raise
        raise UnsupportedConfigError(f"{folder}: transformers cannot shard it so: {error}") from error


def group_of(model: nn.Module) -> ProcessGroup | None:
    """The processes that a model is spread over; None if it is whole in this one."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None or mesh.size() == 1:
        return None
    group: ProcessGroup = (mesh if mesh.ndim == 1 else mesh["tp"]).get_group()
    return group


def is_sharding_hook(module: nn.Module) -> bool:
    """Whether a module's own `forward` is what transformers puts around a sharded one: collectives, and local weights.

    What accelerate puts there for offloading is none.
    """
    return bool(getattr(module, "_is_hooked", False)) and not hasattr(module, "_hf_hook")


def whole(parameter: Tensor, name: str) -> Tensor:
    """A parameter of an attention layer as a plain tensor, of which every rank has all.

    Raises:
        UnsupportedConfigError: it is sharded.
    """
    if not torch.distributed.is_available():
        return parameter
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return parameter
    if not all(placement.is_replicate() for placement in parameter.placements):
        raise UnsupportedConfigError(
            f"{name} is sharded ({', '.join(map(str, parameter.placements))}), and our attention reads its weights "
            "whole: leave the attention layers out of the plan"
        )
    return nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)
