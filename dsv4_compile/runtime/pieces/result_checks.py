"""What an op gives is what its schema and its fake promised; checked while nothing is replayed.

A plan is made from promises. A wrong one would not crash: a copy into a slot converts dtypes, and cuts the tie between
a result and the buffer that it really is. Warm-ups and captures check, and with compiled pieces every uncaptured call.

A custom op whose promise is wrong is its author's to mend: that is an error. Its strides may differ, since what crosses
is copied; but a compiled piece reads the results of its own custom ops where they are, so there they may not.

An op of torch's own whose promise is wrong is nobody's mistake here: calls of these sizes do without the plan. They run
the traced graph, where everybody sees what the kernel really gives (`why_unlike` says what differs).
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from torch import Tensor, fx

from ...analysis.byte_ranges import share_bytes
from ...analysis.eager_reasons import custom_ops, has_unknown_size
from ...compat.dispatch import OpOverload, op_name, pytree
from ...errors import AliasingOpError, LayoutMismatchError
from ...graph.joined_call import op_of
from ...graph.source_lines import where
from ...graph.traced import TensorMeta, TracedGraph
from ...log import log


def check_layout(traced: TracedGraph, node: fx.Node, value: Tensor, promised: Tensor, *, strides: bool = False) -> None:
    """Raise LayoutMismatchError unless a value has the shape and dtype, and if asked the strides, of the plan."""
    is_alike = value.dtype == promised.dtype and value.shape == promised.shape
    if is_alike and (not strides or has_strides_of(value, promised)):
        return
    producer = traced.producer(node)
    raise LayoutMismatchError(
        f"{_name(producer)} gave {_layout(value, strides)}, its fake promised {_layout(promised, strides)} "
        f"({where(producer)}): make the fake of the op agree with the op (torch.library.opcheck finds this)"
    )


def why_unlike(traced: TracedGraph, node: fx.Node, value: Tensor, promised: Tensor) -> str | None:
    """What an op gives where its fake promised something else; None if it is as promised in all that can be seen."""
    is_alike = value.dtype == promised.dtype and value.shape == promised.shape and has_strides_of(value, promised)
    if is_alike and (value.is_conj(), value.is_neg()) == (promised.is_conj(), promised.is_neg()):
        return None
    producer = traced.producer(node)
    log.info("%s gave %s, its fake promised %s", _name(producer), _seen(value), _seen(promised))
    return f"{_name(producer)} gives another layout than its fake promises ({where(producer)})"


def results_overlap(traced: TracedGraph, node: fx.Node, value: object) -> bool:
    """Whether two tensors that a node gives have elements in one place, where its fake gave each its own memory."""
    promised = pytree.tree_leaves(traced.effects[node].result)
    by_storage: defaultdict[int, list[tuple[Tensor, int]]] = defaultdict(list)
    for tensor, meta in zip(pytree.tree_leaves(value), promised, strict=False):
        if isinstance(tensor, Tensor) and isinstance(meta, TensorMeta) and tensor.numel():
            by_storage[tensor.untyped_storage().data_ptr()].append((tensor, meta.storage))
    return any(
        one_storage != other_storage and share_bytes(one, other)
        for given in by_storage.values()
        for (one, one_storage), (other, other_storage) in itertools.combinations(given, 2)
    )


def why_other_memory(traced: TracedGraph, node: fx.Node, value: object, taken: object) -> str | None:
    """The op gives memory of an argument, or of another result, where its fake made some, or not where it did not."""
    producer = traced.producer(node)
    if results_overlap(traced, node, value):
        return f"results of {_name(producer)} share memory, and its fake promises that they do not ({where(producer)})"
    known = {traced.storage_of(arg) for arg in producer.all_input_nodes}
    given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(taken) if isinstance(t, Tensor)} - {0}
    for tensor, meta in zip(pytree.tree_leaves(value), pytree.tree_leaves(traced.effects[node].result), strict=False):
        address = tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else 0
        if address and isinstance(meta, TensorMeta) and (address in given) != (meta.storage in known):
            return f"{_name(producer)} gives other memory than its fake promises ({where(producer)})"
    return None


def _seen(tensor: Tensor) -> str:
    bits = [name for name, is_set in (("conjugated", tensor.is_conj()), ("negated", tensor.is_neg())) if is_set]
    return " ".join([_layout(tensor, True), *bits])


def has_strides_of(value: Tensor, promised: Tensor) -> bool:
    """Whether elements lie in the same order; the stride of a dim of one element means nothing."""
    pairs = zip(value.size(), value.stride(), promised.stride(), strict=True)
    return value.numel() == 0 or all(size == 1 or stride == other for size, stride, other in pairs)


def _layout(tensor: Tensor, strides: bool) -> str:
    text = f"{list(tensor.shape)} {tensor.dtype}"
    return f"{text} with strides {list(tensor.stride())}" if strides else text


def check_fresh(traced: TracedGraph, node: fx.Node, value: object, taken: object) -> None:
    """Raise AliasingOpError if a value shares memory that the plan knows nothing of.

    With what it was made from, or, of a custom op, one of its results with another: each gets a slot, and a write to
    one would not show in the other. Parts of one buffer that lie side by side are no harm.
    """
    producer = traced.producer(node)
    if not traced.effects[producer].makes or traced.effects[node].is_view:
        return
    if custom_ops(traced, producer) and results_overlap(traced, node, value):
        raise AliasingOpError(
            f"results of op {_name(producer)} share memory, but its fake promises fresh ones ({where(producer)}): "
            "return clones, or one tensor of which the caller takes views"
        )
    storages = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(taken) if isinstance(t, Tensor)} - {0}
    promised = pytree.tree_leaves(traced.effects[node].result)
    for tensor, meta in zip(pytree.tree_leaves(value), promised, strict=False):
        is_fresh = isinstance(meta, TensorMeta) and meta.storage in traced.effects[producer].makes
        if is_fresh and _may_be_a_view(traced, node, producer):
            continue
        if is_fresh and isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in storages:
            raise AliasingOpError(
                f"op {_name(producer)} returned memory of an argument, but its schema promises a fresh tensor "
                f"({where(producer)}): return nothing, return a clone, or declare the alias"
            )


def _may_be_a_view(traced: TracedGraph, node: fx.Node, producer: fx.Node) -> bool:
    """Data decides the size of a result of torch's own, and nobody writes it, or what it was made from, afterwards.

    Of one row `x.t().contiguous()` is `x` itself; it is made and used by eager ops alone, which see what eager ones do.
    """
    if custom_ops(traced, producer) or not has_unknown_size(traced, traced.effects[node].result):
        return False
    nodes = list(traced.effects)
    later = traced.written_by(nodes[nodes.index(producer) + 1 :])
    return not later & {traced.storage_of(each) for each in (node, *producer.all_input_nodes)}


def _name(node: fx.Node) -> str:
    op = op_of(node.target)
    if isinstance(op, OpOverload):
        return op_name(op)
    return str(getattr(node.target, "__name__", node.target))
