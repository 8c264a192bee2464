"""Make Triton's interpreter right for bf16 and e4m3, where it is silently wrong.

Triton 3.6 to 3.9 keep bf16 as uint16 and fp8 as uint8 in numpy and then, without an error,
multiply bit patterns in `tl.dot` and in arithmetic, truncate f32 to bf16, lose carries and round
ties away in f32 to e4m3, decode e4m3's NaN as 480, and read an NVFP4 scale byte as e8m0.
`patched()` mends these in the running process. The decodings and roundings are written here from
the formats' definitions, so that comparing them with torch's is a test of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

E4M3_MAX = 448.0
ODD = (tl.bfloat16, tl.float8e4nv)  # the types numpy lacks, held as unsigned integers
PLAIN = (tl.float16, tl.float32)


def _e4m3_values() -> np.ndarray:
    """Return all 256 values: 4 exponent bits of bias 7, 3 mantissa bits, no infinity."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.exp2(exponent - 7.0) * (1 + mantissa / 8)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    magnitude[code & 127 == 127] = np.nan
    return np.where(code > 127, -magnitude, magnitude).astype(np.float32)


E4M3 = _e4m3_values()
E4M3_FINITE = E4M3[:127].copy()  # rising, from zero to 448


def decode(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Return bf16 or e4m3 bit patterns as float32, which holds every one of them."""
    if dtype == tl.bfloat16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == tl.float8e4nv:
        return E4M3[data.view(np.uint8)]
    return data


def encode_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bf16 bit patterns, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """Round float32 to e4m3 codes as `cvt.rn.satfinite` does: ties to even, beyond 448 to 448."""
    values = np.asarray(values, dtype=np.float32)
    magnitude = np.minimum(np.nan_to_num(np.abs(values), posinf=E4M3_MAX), E4M3_MAX)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -6)
    step = np.exp2(exponent - 3.0).astype(np.float32)
    nearest = np.rint(magnitude / step) * step  # dividing by a power of two is exact
    code = np.searchsorted(E4M3_FINITE, nearest)
    code = np.where(np.isnan(values), 127, code) + np.where(np.signbit(values), 128, 0)
    return code.astype(np.uint8)


def encode(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Round float32 to the type, in the array type the interpreter holds it in."""
    if dtype == tl.bfloat16:
        return encode_bf16(values)
    if dtype == tl.float8e4nv:
        return encode_e4m3(values)
    with np.errstate(over="ignore"):
        return values.astype(interpreter._get_np_dtype(dtype))


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: Any) -> np.ndarray:
    if source not in ODD and target not in ODD:
        return _stock_convert_float(data, source, target, mode)
    known = source in (*ODD, *PLAIN) and target in (*ODD, *PLAIN)
    if not known or mode == interpreter._ir.ROUNDING_MODE.RTZ:
        raise NotImplementedError(f"{source} to {target}, {mode}")
    values = encode(decode(data, source).astype(np.float32), target)
    unsigned = f"uint{target.primitive_bitwidth}"
    return np.ascontiguousarray(values).view(unsigned).reshape(data.shape)


def _cast_impl(self: Any, source: Handle, target_type: Any) -> Handle:
    target = target_type.scalar
    if source.dtype.scalar in ODD or target in ODD:
        values = decode(source.data, source.dtype.scalar)
        if target in ODD:
            values = values.astype(np.float32)
        return Handle(encode(values, target), target)
    return _stock_cast_impl(self, source, target_type)


def _elementwise(stock: Callable[..., Handle]) -> Callable[..., Handle]:
    """Wrap a `(self, *handles, op)` method: odd operands in float32, the result rounded back."""

    def method(self: Any, *arguments: Any) -> Handle:
        *handles, op = arguments
        dtype = handles[-1].dtype.scalar
        if dtype not in ODD or op is np.where:
            return stock(self, *arguments)
        result = op(*(decode(handle.data, handle.dtype.scalar) for handle in handles))
        if result.dtype == np.bool_:
            return Handle(result, tl.int1)
        return Handle(encode(result, dtype), dtype)

    return method


def _create_fma(self: Any, x: Handle, y: Handle, z: Handle) -> Handle:
    dtype = z.dtype.scalar
    if dtype not in ODD:
        return _stock_create_fma(self, x, y, z)
    a, b, c = (decode(handle.data, dtype).astype(np.float64) for handle in (x, y, z))
    return Handle(encode((a * b + c).astype(np.float32), dtype), dtype)


def _create_dot(self: Any, a: Handle, b: Handle, d: Handle, *options: Any) -> Handle:
    def widened(handle: Handle) -> Handle:
        dtype = handle.dtype.scalar
        return Handle(decode(handle.data, dtype), tl.float32) if dtype in ODD else handle

    return _stock_create_dot(self, widened(a), widened(b), d, *options)


def _scale_to_f32(scale: Handle, *options: Any) -> np.ndarray:
    if scale.dtype.scalar == tl.float8e4nv:
        return decode(scale.data, tl.float8e4nv)
    return _stock_scale_to_f32(scale, *options)


_stock_convert_float = interpreter._convert_float
_stock_cast_impl = Builder.cast_impl
_stock_create_fma = Builder.create_fma
_stock_create_dot = Builder.create_dot
_stock_scale_to_f32 = interpreter._dot_scaled_scale_to_f32

Replacements = tuple[tuple[Any, str, Callable[..., Any]], ...]
PATCHES: Replacements = (
    (interpreter, "_convert_float", _convert_float),
    (interpreter, "_dot_scaled_scale_to_f32", _scale_to_f32),
    (Builder, "cast_impl", _cast_impl),
    (Builder, "binary_op", _elementwise(Builder.binary_op)),
    (Builder, "ternary_op", _elementwise(Builder.ternary_op)),
    (Builder, "unary_op", _elementwise(Builder.unary_op)),
    (Builder, "create_fma", _create_fma),
    (Builder, "create_dot", _create_dot),
)
STOCK: Replacements = tuple((owner, name, getattr(owner, name)) for owner, name, _ in PATCHES)


@contextmanager
def _using(replacements: Replacements) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, function in replacements:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


@contextmanager
def patched() -> Iterator[None]:
    """Mend the interpreter inside the block; like a GPU, do not warn of an overflow to infinity."""
    with _using(PATCHES), np.errstate(over="ignore"):
        yield


def unpatched() -> AbstractContextManager[None]:
    """Use the interpreter as it comes inside the block, to show its faults."""
    return _using(STOCK)
