"""Leaves out recorded copies: a value that is only made to be copied is made where it is copied to.

    c = mm(a, b)                   mm(a, b, out=slot)
    r = relu(c, out=...)    ->     r = relu(slot, out=...)
    copy_(slot, c)

Each condition below is a fact without which that changes a result. They are checked one by one against every copy,
and the first that fails is the reason why a copy stays. The order of launches never changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ....analysis.sizes import bytes_needed
from .launch import AnyLaunch, Launch, Operand
from .pool import tensor_in

# how torch aligns memory on the CPU
_TORCH_ALIGNMENT = 64


@dataclass(frozen=True)
class Site:
    """A copy among the launches, and where the copied value is born.

    Attributes:
        launches: all of them.
        copy: index of the copy.
        birth: index of the first launch that touches the value's memory.
        slot: what is written.
        value: what is copied.
    """

    launches: list[AnyLaunch]
    copy: int
    birth: int
    slot: Operand
    value: Operand


def elide_copies(launches: list[AnyLaunch]) -> list[AnyLaunch]:
    """The launches without the copies that can be left out; moves operands of the others."""
    kept = list(launches)
    index = 0
    while index < len(kept):
        site = _find_site(kept, index)
        if site is not None and why_kept(site) is None:
            _move_to_slot(site)
            del kept[index]
        else:
            index += 1
    return kept


def drop_unused_results(launches: list[AnyLaunch]) -> None:
    """Leave out results that nobody looks at, such as the statistics of a layer norm, where they would be copied."""
    uses = Counter(id(lease) for launch in launches for lease in {operand.lease for operand in launch.operands})
    for launch in launches:
        if isinstance(launch, Launch) and launch.copies_results:
            for operand in launch.results:
                if operand.lease is not None and uses[id(operand.lease)] == 1 and operand.lease.has_ended():
                    launch.drop_result(operand)


def why_kept(site: Site) -> str | None:
    """Why a copy has to stay, or None."""
    return next((reason for reason in (check(site) for check in CONDITIONS) if reason), None)


def differs_in_layout(site: Site) -> str | None:
    """Elements of the value would lie elsewhere, or be of another type."""
    slot, value = site.slot.tensor, site.value.tensor
    if slot.dtype != value.dtype or slot.size() != value.size() or slot.stride() != value.stride():
        return "the slot has another layout"
    users = [operand.tensor for launch in _users(site) for operand in launch.operands if _moves(site, operand)]
    lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in [slot, value, *users])
    return "a lazy conjugate or negative is involved" if lazy else None


def is_part(site: Site) -> str | None:
    """Views of the rest of the value's memory would not fit into the slot."""
    value, lease = site.value.tensor, site.value.lease
    assert lease is not None
    size = bytes_needed(value.size(), value.stride(), value.element_size())
    return None if value.storage_offset() == 0 and size == lease.nbytes else "the value is part of something larger"


def is_born_in_part(site: Site) -> str | None:
    """A value filled piece by piece, or not at all, would show what the slot held before."""
    made = site.launches[site.birth].results
    whole = any(operand.lease is site.value.lease and is_part(_at(site, operand)) is None for operand in made)
    return None if whole else "no single launch makes the value"


def is_used_later(site: Site) -> str | None:
    """The slot belongs to its owner once it is written; it may change under later readers of the value."""
    later = site.launches[site.copy + 1 :]
    return "a later launch uses the value" if any(_touches(launch, site.value) for launch in later) else None


def is_held_outside(site: Site) -> str | None:
    """Somebody holds the tensor, expecting its memory to be written at replay."""
    lease = site.value.lease
    return None if lease is None or lease.has_ended() else "a reference to the value outlives the capture"


def slot_is_touched(site: Site) -> str | None:
    """From the birth of the value to the copy, the slot still has its old contents, and somebody else uses them."""
    for index, launch in enumerate(_users(site)):
        others = [operand for operand in launch.operands if not _moves(site, operand)]
        # the first, if opaque, is over before its result is copied to where it belongs
        if (launch.opaque and index > 0) or any(operand.overlaps(site.slot) for operand in others):
            return f"{launch.name} may touch the slot before"
    return None


def slot_is_misaligned(site: Site) -> str | None:
    """Kernels may round differently at an address that torch would not have chosen."""
    slot = site.slot.tensor
    aligned = slot.data_ptr() % _TORCH_ALIGNMENT == slot.untyped_storage().data_ptr() % _TORCH_ALIGNMENT == 0
    return None if aligned else f"the slot is not aligned to {_TORCH_ALIGNMENT} bytes"


CONDITIONS: tuple[Callable[[Site], str | None], ...] = (
    differs_in_layout,
    is_part,
    is_born_in_part,
    is_used_later,
    is_held_outside,
    slot_is_touched,
    slot_is_misaligned,
)


def _find_site(launches: list[AnyLaunch], index: int) -> Site | None:
    """The site of a copy out of pool memory into other memory; None for any other launch."""
    launch = launches[index]
    if not (isinstance(launch, Launch) and launch.is_copy):
        return None
    slot, value = launch.args[0], launch.args[1]
    if value.lease is None or value.lease is slot.lease:
        return None
    birth = next(i for i, earlier in enumerate(launches) if _touches(earlier, value))
    return Site(launches, index, birth, slot, value) if birth < index else None


def _move_to_slot(site: Site) -> None:
    slot = site.slot
    start = slot.tensor.storage_offset() * slot.tensor.element_size()
    for launch in _users(site):
        for operand in filter(partial(_moves, site), launch.operands):
            offset = start // operand.tensor.element_size() + operand.tensor.storage_offset()
            operand.tensor = tensor_in(slot.tensor.untyped_storage(), operand.tensor, int(offset))
            operand.block, operand.lease = slot.block, slot.lease


def _users(site: Site) -> list[AnyLaunch]:
    """Launches from the birth of the value up to the copy."""
    return site.launches[site.birth : site.copy]


def _moves(site: Site, operand: Operand) -> bool:
    return operand.lease is site.value.lease


def _touches(launch: AnyLaunch, value: Operand) -> bool:
    return any(operand.lease is value.lease for operand in launch.operands)


def _at(site: Site, operand: Operand) -> Site:
    return replace(site, value=operand)
