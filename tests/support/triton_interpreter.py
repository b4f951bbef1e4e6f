"""Triton's interpreter, made exact for bf16 and fp8: import this before any kernel, with TRITON_INTERPRET=1.

It keeps bf16 as its bits in uint16, and in 3.6 works on those bits in `tl.dot`, arithmetic and comparisons. It cuts
bits off where fp32 becomes bf16, loses the carry into the exponent where it becomes fp8, and reads a NaN of e4m3 as a
number. All of that is silent. Here each such operation goes through torch: up to fp32, there, and back with one
rounding, which is what a GPU does. Conversions to fp8 saturate, as `cvt.satfinite` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH_DTYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
# what each operation on bf16 is in fp32; those that give masks or integers give them as they are
ARITHMETIC = [
    *("fadd", "fsub", "fmul", "fdiv", "frem", "fneg", "fma", "fabs", "minimumf", "maximumf", "minnumf", "maxnumf"),
    *("clampf", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil"),
]
COMPARISONS = [f"fcmp{order}{what}" for order in "OU" for what in ("LT", "GT", "LE", "GE", "EQ", "NE")]


def to_torch(bits: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    """The numbers that an array of the interpreter stands for."""
    kept = torch.from_numpy(np.ascontiguousarray(bits).view(f"i{dtype.primitive_bitwidth // 8}").copy())
    return kept.view(TORCH_DTYPES[dtype])


def to_numpy(numbers: torch.Tensor, dtype: tl.dtype) -> np.ndarray:
    """The array by which the interpreter stands for numbers of a dtype."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.primitive_bitwidth // 8]
    return numbers.contiguous().view(integers).numpy().view(interpreter._get_np_dtype(dtype))


def convert(bits: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """Numbers of one dtype rounded to another, to the nearest, ties to even."""
    numbers = to_torch(bits, source)
    numbers = numbers if numbers.dtype is torch.float64 else numbers.float()
    if (largest := LARGEST.get(target)) is not None:
        numbers = torch.where(numbers.isnan(), numbers, numbers.clamp(-largest, largest))
    return to_numpy(numbers.to(TORCH_DTYPES[target]), target).reshape(bits.shape)


def cast(builder: Any, value: Any, dtype: tl.dtype) -> Any:
    source, target = value.dtype.scalar, dtype.scalar
    if source in TORCH_DTYPES and target in TORCH_DTYPES:
        data = value.data if source == target else convert(value.data, source, target)
    elif source in TORCH_DTYPES and source.primitive_bitwidth <= 16:
        data = to_torch(value.data, source).float().numpy().astype(interpreter._get_np_dtype(target))
    elif target in TORCH_DTYPES and target.primitive_bitwidth <= 16:
        data = convert(value.data.astype(np.float32), tl.float32, target)
    else:
        data = value.data.astype(interpreter._get_np_dtype(target))
    return interpreter.TensorHandle(data, target)


def round_to(builder: Any, value: Any, dtype: tl.dtype, rounding: Any) -> Any:
    if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
        raise NotImplementedError("only rounding to the nearest")
    return cast(builder, value, dtype)


def dot(builder: Any, a: Any, b: Any, summed: Any, precision: Any, imprecise: Any) -> Any:
    left, right = (to_torch(x.data, x.dtype.scalar).float().numpy() for x in (a, b))
    product = np.matmul(left, right, dtype=np.float32)
    return interpreter.TensorHandle(product.astype(summed.data.dtype) + summed.data, summed.dtype.scalar)


def is_bf16(value: Any) -> bool:
    return isinstance(value, interpreter.TensorHandle) and value.dtype.scalar == tl.bfloat16


def in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that takes bf16 to fp32, works there, and rounds a result of numbers once."""

    def operation(builder: Any, *arguments: Any) -> Any:
        if not any(map(is_bf16, arguments)):
            return original(builder, *arguments)
        result = original(builder, *(cast(builder, x, tl.float32) if is_bf16(x) else x for x in arguments))
        # the handle of a comparison has the type of what was compared
        return cast(builder, result, tl.bfloat16) if result.data.dtype == np.float32 else result

    return operation


def bf16_constant(builder: Any, value: float) -> Any:
    return interpreter.TensorHandle(convert(np.array([value], np.float32), tl.float32, tl.bfloat16), tl.bfloat16)


def with_index(original: Callable[..., None]) -> Callable[..., None]:
    """A number in an array of one element, which numpy 2.4 does not take for a bound of a loop any more."""

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def repair() -> None:
    """Put the exact operations in the place of the interpreter's own."""
    np.seterr(all="ignore")  # a GPU gives infinity and NaN without a word
    interpreter._patch_lang_tensor = with_index(interpreter._patch_lang_tensor)
    builder = interpreter.InterpreterBuilder
    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast, round_to, dot
    builder.get_bf16 = bf16_constant
    for name in (*ARITHMETIC, *COMPARISONS):
        if hasattr(builder, f"create_{name}"):
            setattr(builder, f"create_{name}", in_fp32(getattr(builder, f"create_{name}")))


repair()
