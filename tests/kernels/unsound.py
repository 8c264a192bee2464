"""Kernels that compile and are not what their configurations promise. No test imports this."""

from __future__ import annotations

import triton
import triton.language as tl

from tonnage.kernels.spec import LaunchConfig


@triton.jit
def nothing_kernel(source, target, BLOCK: tl.constexpr):
    """Load and store nothing."""
    tl.load(source + tl.arange(0, BLOCK))


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    """Copy a block."""
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def product_kernel(source, target, BLOCK: tl.constexpr):
    """Multiply a square block by itself."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    block = tl.load(source + at)
    tl.store(target + at, tl.dot(block, block).to(tl.bfloat16))


@triton.jit
def softmax_kernel(source, target, BLOCK: tl.constexpr):
    """Normalise a block that a warp's registers do not hold."""
    at = tl.arange(0, BLOCK)
    exponentials = tl.exp(tl.load(source + at).to(tl.float32))
    tl.store(target + at, (exponentials / tl.sum(exponentials)).to(tl.bfloat16))


def _config(kernel: str, name: str, block: int, instruction: str | None, **other) -> LaunchConfig:
    pointers = ("source", "target")
    return LaunchConfig(
        kernel=kernel,
        name=name,
        signature=dict.fromkeys(pointers, "*bf16"),
        constants={"BLOCK": block},
        num_warps=other.get("num_warps", 4),
        num_stages=1,
        aligned=other.get("aligned", pointers),
        instruction=dict.fromkeys((90, 100), instruction),
        vector_loads=kernel != "product_kernel",
    )


CONFIGS = (
    _config("copy_kernel", "sound", 1024, None),
    _config("product_kernel", "sound", 16, "mma.sync"),
    _config("nothing_kernel", "stores nothing", 1024, None),
    _config("copy_kernel", "loads narrowly", 1024, None, aligned=()),
    _config("product_kernel", "hopes for wgmma", 16, "wgmma"),
    _config("product_kernel", "should not multiply", 16, None),
    _config("softmax_kernel", "spills", 8192, None, num_warps=1),
    _config("copy_kernel", "does not compile", 1000, None),
)
