"""Programs on DTensors and other wrapper subclasses, for a mesh of any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def sharded(tensor: Tensor, on: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(tensor, on, list(placements) or [Replicate()])


class ShardedMLP(nn.Module):
    """A column-wise, a row-wise and a replicated linear, as tensor parallelism has them."""

    def __init__(self, on: DeviceMesh, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.on = on
        self.up, self.down, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False), nn.Linear(4, 4)
        places = {"up.weight": Shard(0), "down.weight": Shard(1)}
        for name, parameter in list(self.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            value = sharded(parameter.detach(), on, places.get(name, Replicate()))
            setattr(self.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        hidden = DTensor.from_local(x + 1, self.on, [Replicate()], run_check=False)
        hidden = self.down(self.up(hidden).relu()).redistribute(placements=[Replicate()])
        result: Tensor = self.head(hidden).to_local()
        return result * 2


class Programs:
    """Functions of one tensor, plain or not, with weights of a mesh."""

    def __init__(self, on: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.on = on
        self.weight = sharded(torch.randn(4, 4), on, Shard(0))
        self.bias = sharded(torch.randn(4), on)
        self.table = sharded(torch.randn(40, 4), on, Shard(0))
        self.two = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))

    def state(self) -> list[Tensor]:
        return [self.weight.to_local(), self.bias.to_local(), self.two.a, self.two.b]

    def sums_partials(self, x: Tensor) -> Tensor:
        part = DTensor.from_local(x, self.on, [Partial()])
        return part.redistribute(placements=[Replicate()]).to_local() + 1

    def gathers(self, x: DTensor) -> Any:
        return x.full_tensor() * 2, x @ self.weight

    def returns_its_argument(self, x: DTensor) -> Any:
        return x, x + 1, x

    def writes_its_argument(self, x: DTensor) -> Any:
        return x.add_(1), x * 2

    def writes_a_weight(self, x: Tensor) -> Any:
        self.bias.add_(1)
        return x + self.bias.to_local()

    def reads_sizes(self, x: DTensor) -> Any:
        return x.view(x.shape[0] * 2, -1).to_local() + x.shape[0], x.shape[0]

    def gives_views(self, x: DTensor) -> Any:
        flat = x.view(-1)
        return flat, flat, x.to_local()[1:]

    def splits_and_joins(self, x: DTensor) -> Any:
        left, right = x.chunk(2, dim=1)
        return torch.cat([right, left], 1), left.to_local() + 1

    def under_autocast(self, x: DTensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ self.weight
            z = y.to_local() @ torch.ones(4, 4)
        return y * 2, z, x @ self.weight

    def in_inference_mode(self, x: DTensor) -> Any:
        with torch.inference_mode():
            y = (x @ self.weight).to_local()
        return y + 1

    def normalises(self, x: DTensor) -> Any:
        return nn.functional.layer_norm(x, (4,), weight=self.bias, bias=self.bias), x.sum(-1, keepdim=True)

    def squeezes_in_place(self, x: DTensor) -> Any:
        y = x.unsqueeze(0)
        y.squeeze_(0)
        return y + 1

    def checkpoints(self, x: DTensor) -> Any:
        def body(t: DTensor) -> Any:
            return (t @ self.weight) * 2

        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)

    def maps(self, x: DTensor) -> Any:
        return torch.vmap(lambda row: row * 2)(x.to_local()), x + 1

    def embeds(self, x: Tensor) -> Any:
        """The mask of the rows that this rank has lies in the placement of the result until that is reduced."""
        ids = DTensor.from_local(x.long() % 40, self.on, [Replicate()], run_check=False)
        part = nn.functional.embedding(ids, self.table)
        other = x + 1
        return part.redistribute(placements=[Replicate()]).to_local() + other.sum(), other

    def takes_two(self, x: TwoTensor) -> Any:
        return x * 2 + self.two[0], x.add_(1)


def replicated(programs: Programs, n: int) -> Tensor:
    return sharded(torch.arange(4.0 * n).reshape(n, 4), programs.on)


def row_sharded(programs: Programs, n: int) -> Tensor:
    return sharded(torch.arange(4.0 * n).reshape(n, 4), programs.on, Shard(0))


def plain(programs: Programs, n: int) -> Tensor:
    return torch.arange(4.0 * n).reshape(n, 4) + dist.get_rank()


def twofold(programs: Programs, n: int) -> Tensor:
    return TwoTensor(torch.arange(4.0 * n).reshape(n, 4), torch.ones(n, 4))


def nested(programs: Programs, n: int) -> Tensor:
    return TwoTensor(replicated(programs, n), replicated(programs, n))


Make = Callable[[Programs, int], Tensor]
CASES: Sequence[tuple[str, Make]] = [
    ("sums_partials", plain),
    ("embeds", plain),
    ("gathers", replicated),
    ("writes_its_argument", replicated),
    ("returns_its_argument", replicated),
    ("takes_two", twofold),
    ("under_autocast", replicated),
    ("gathers", row_sharded),
    ("returns_its_argument", row_sharded),
    ("returns_its_argument", nested),
    ("writes_its_argument", row_sharded),
    ("writes_a_weight", plain),
    ("reads_sizes", replicated),
    ("gives_views", replicated),
    ("splits_and_joins", replicated),
    ("in_inference_mode", replicated),
    ("normalises", replicated),
    ("squeezes_in_place", replicated),
    ("checkpoints", replicated),
    ("maps", replicated),
]


def differences(programs: Programs, name: str, make: Make, options: dict[str, Any], dynamic: bool | None) -> list[str]:
    """What a compiled program does otherwise than eager, over calls of several sizes."""
    function = getattr(programs, name)
    compiled = torch.compile(function, backend="dsv4_piecewise", dynamic=dynamic, options=options)
    found = []
    for number, n in enumerate((5, 5, 5, 6, 6, 6, 5)):
        before = [tensor.clone() for tensor in programs.state()]
        wanted, wanted_state = _outcome(programs, function, make(programs, n))
        for tensor, old in zip(programs.state(), before, strict=True):
            tensor.copy_(old)
        given, given_state = _outcome(programs, compiled, make(programs, n))
        if given != wanted or given_state != wanted_state:
            found.append(f"call {number}: {given} and not {wanted}")
    return found


@torch.no_grad()
def _outcome(programs: Programs, function: Any, x: Tensor) -> tuple[list[object], list[object]]:
    leaves = pytree.tree_leaves(function(x))
    ids = [id(leaf) for leaf in leaves]
    same = [(leaf is x, ids.index(id(leaf))) for leaf in leaves if isinstance(leaf, Tensor)]
    return [*map(described, leaves), same, described(x)], list(map(described, programs.state()))


def described(value: Any) -> object:
    """A value as lists and numbers; of a tensor, layout included."""
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    if isinstance(value, TwoTensor):
        return "two", described(value.a), described(value.b)
    if isinstance(value, DTensor):
        return "dtensor", value.placements, value.shape, value.stride(), described(value.to_local())
    return (value.dtype, value.stride(), value.tolist()) if isinstance(value, Tensor) else value
