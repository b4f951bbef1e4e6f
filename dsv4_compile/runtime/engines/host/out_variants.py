"""Ops whose `out=` overload is known to compute what the plain one does.

That is not so for all of torch: `binary_cross_entropy.out` resizes its output on the way and gives another loss, and
the transforms of `fft` round differently. Everything not listed here runs as it is, and its result is copied.
"""

from __future__ import annotations

from functools import cache

from ....compat.dispatch import OpOverload

# What a function that makes a tensor takes and its variant reads off the tensor instead.
TENSOR_OPTIONS = frozenset(["dtype", "layout", "device", "pin_memory"])
# torch generates both overloads of these from one kernel ("structured" in its list of native functions).
_STRUCTURED = """
    _log_softmax _softmax add addcdiv addcmul addmm addmv all amax amin any argmax argmin atan2 baddbmm bitwise_and
    bitwise_not bitwise_or bitwise_xor bmm cat ceil clamp clamp_max clamp_min copysign cos cosh cumprod cumsum div elu
    eq erf exp exp2 expm1 floor fmax fmin fmod frac gather ge gelu glu gt hardsigmoid index index_add leaky_relu le
    lerp log log10 log1p log2 logaddexp lt max maximum mean min minimum mish mm mul ne neg nextafter pow prod reciprocal
    remainder round rsqrt scatter scatter_add scatter_reduce sgn sigmoid sign silu sin sinh softplus sort sqrt sub sum
    tan tanh threshold topk tril triu trunc xlogy
"""
# The plain overload of these makes its result and calls the other one.
_WRAPPED = """
    abs arange floor_divide index_select logical_and logical_not logical_or logical_xor rand randint randn randperm
    stack where
"""
OPS_WITH_OUT_VARIANT = frozenset((_STRUCTURED + _WRAPPED).split())
_WRITERS = frozenset(["copy", "fill", "index_put", "zero"])


@cache
def out_variant(func: OpOverload) -> OpOverload | None:
    """The overload that writes into `out=` tensors what `func` returns, or None."""
    if func.namespace != "aten" or func._opname not in OPS_WITH_OUT_VARIANT:
        return None
    for name in func.overloadpacket.overloads():
        variant: OpOverload = getattr(func.overloadpacket, name)
        if _is_variant(func, variant):
            return variant
    return None


@cache
def ignores_autocast(func: OpOverload) -> bool:
    """Whether replaying the op is the same in an autocast block: it runs one kernel, and `out=` at that, or in place.

    Autocast knows plain overloads only. Other ops may be such, or call them inside.
    """
    writes = func._schema.is_mutable or out_variant(func) is not None
    return func.namespace == "aten" and writes and func._opname.removesuffix("_") in OPS_WITH_OUT_VARIANT | _WRITERS


@cache
def out_names(func: OpOverload) -> tuple[str, ...]:
    """Names of the `out=` arguments."""
    return tuple(argument.name for argument in func._schema.arguments if argument.is_out)


def _is_variant(func: OpOverload, other: OpOverload) -> bool:
    """Whether `other` takes what `func` does, apart from options, and writes what `func` returns."""
    taken = [(a.name, str(a.type)) for a in func._schema.arguments]
    given = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
    dropped = {name for name, kind in taken if (name, kind) not in given}
    same = [argument for argument in taken if argument[0] not in dropped] == given
    outs = [str(a.type) for a in other._schema.arguments if a.is_out]
    returns = [str(value.type) for value in func._schema.returns]
    return bool(outs) and same and dropped <= TENSOR_OPTIONS and outs == returns == ["Tensor"] * len(returns)
