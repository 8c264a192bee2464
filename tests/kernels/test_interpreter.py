"""The interpreter's faults are there, and the patch mends each of them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.interpreter import patched, unpatched

E4M3 = torch.float8_e4m3fn


@triton.jit
def cast_kernel(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def arithmetic_kernel(left, right, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(left + at), tl.load(right + at)
    tl.store(target + at, tl.where(x > y, x * y + x, -y))


@triton.jit
def dot_kernel(left, right, target, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(left + m[:, None] * K + k[None, :])
    b = tl.load(right + k[:, None] * N + n[None, :])
    tl.store(target + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def scaled_dot_kernel(
    left, left_scale, right, right_scale, target, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    m, n = tl.arange(0, M), tl.arange(0, N)
    byte, scale = tl.arange(0, K // 2), tl.arange(0, K // 16)
    a = tl.load(left + m[:, None] * (K // 2) + byte[None, :])
    b = tl.load(right + n[None, :] * (K // 2) + byte[:, None])
    a_scale = tl.load(left_scale + m[:, None] * (K // 16) + scale[None, :])
    b_scale = tl.load(right_scale + n[:, None] * (K // 16) + scale[None, :])
    product = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1")
    tl.store(target + m[:, None] * N + n[None, :], product)


def cast(source: torch.Tensor, target_type: torch.dtype) -> torch.Tensor:
    target = torch.zeros(source.shape, dtype=target_type)
    cast_kernel[(1,)](source, target, COUNT=source.numel())
    return target


def differing(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """Count the elements whose bytes differ, any NaN being as good as another."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[actual.element_size()]
    same = actual.view(unsigned) == expected.view(unsigned)
    return int((~(same | actual.float().isnan() & expected.float().isnan())).sum())


def hard_floats(count: int, scale: float, seed: int) -> torch.Tensor:
    """Return random floats with every tie, carry, edge and special among them."""
    random = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    ties = (codes[1:] + codes[:-1]) / 2
    edges = torch.tensor([448, 464, 480, 1e9, torch.inf, torch.nan, 1e-9, 2**-10, 2**-9, 0.0])
    hard = torch.cat([codes, ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, -ties)])
    random[: 2 * len(hard)] = torch.cat([hard, -hard])
    random[-2 * len(edges) :] = torch.cat([edges, -edges])
    return random


@pytest.mark.parametrize("scale", [1.0, 100.0, 2**-8], ids=["unit", "large", "subnormal"])
@pytest.mark.parametrize("source_type", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_cast_to_e4m3_is_torchs(source_type: torch.dtype, scale: float) -> None:
    source = hard_floats(1 << 16, scale, seed=1).to(source_type)
    expected = source.to(E4M3)
    with unpatched():
        assert differing(cast(source, E4M3), expected) > 1000
    assert differing(cast(source, E4M3), expected) == 0


@pytest.mark.parametrize("target_type", [torch.float32, torch.bfloat16, torch.float16])
def test_all_codes_of_e4m3_decode_as_torchs(target_type: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    with unpatched():
        assert differing(cast(codes, target_type), codes.to(target_type)) == 2  # both NaN codes
    assert differing(cast(codes, target_type), codes.to(target_type)) == 0


def test_a_cast_to_bf16_rounds_to_nearest_even() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(2))
    bits[::4] = bits[::4] & ~0xFFFF | 0x8000  # ties
    source = bits.to(torch.int32).view(torch.float32)
    with unpatched():
        assert differing(cast(source, torch.bfloat16), source.bfloat16()) > 20_000
    assert differing(cast(source, torch.bfloat16), source.bfloat16()) == 0


def test_all_bf16_widen_exactly() -> None:
    source = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert differing(cast(source, torch.float32), source.float()) == 0


def test_whole_numbers_become_bf16() -> None:
    source = torch.arange(-2048, 2048, dtype=torch.int32)
    with unpatched():
        assert differing(cast(source, torch.bfloat16), source.bfloat16()) > 4000
    assert differing(cast(source, torch.bfloat16), source.bfloat16()) == 0
    assert torch.equal(cast(source.bfloat16(), torch.int32), source.bfloat16().int())


def test_bf16_arithmetic_is_arithmetic() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 4096, generator=generator).bfloat16()
    expected = torch.where(x > y, x * y + x, -y)

    def found() -> torch.Tensor:
        target = torch.zeros_like(x)
        arithmetic_kernel[(1,)](x, y, target, COUNT=4096)
        return target

    with unpatched():
        assert differing(found(), expected) > 1000
    assert differing(found(), expected) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3], ids=str)
def test_a_dot_multiplies_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(32, 64, generator=generator).to(dtype)
    b = torch.randn(64, 16, generator=generator).to(dtype)
    expected = a.double() @ b.double()

    def error() -> float:
        target = torch.zeros(32, 16)
        dot_kernel[(1,)](a, b, target, M=32, N=16, K=64)
        return float((target - expected).abs().max() / expected.abs().max())

    if dtype == torch.bfloat16:
        with unpatched():
            assert error() > 1e3
    assert error() < 1e-6


def test_an_nvfp4_dot_reads_its_scales_as_e4m3() -> None:
    generator = torch.Generator().manual_seed(5)
    m, n, k = 16, 32, 64
    a = torch.randint(256, (m, k // 2), dtype=torch.uint8, generator=generator)
    b = torch.randint(256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = [torch.rand(rows, k // 16, generator=generator).to(E4M3) for rows in (m, n)]
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat([steps, -steps])

    def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        return values[nibbles.long()] * scale.double().repeat_interleave(16, 1)

    expected = decoded(a, scales[0]) @ decoded(b, scales[1]).T

    def error() -> float:
        target = torch.zeros(m, n)
        scaled_dot_kernel[(1,)](a, scales[0], b, scales[1], target, M=m, N=n, K=k)
        return float((target - expected).abs().max() / expected.abs().max())

    with unpatched():
        assert error() > 0.5
    assert error() < 1e-6


def test_the_patch_leaves_when_told() -> None:
    with unpatched():
        before = triton.runtime.interpreter._convert_float
        with patched():
            assert triton.runtime.interpreter._convert_float is not before
        assert triton.runtime.interpreter._convert_float is before
