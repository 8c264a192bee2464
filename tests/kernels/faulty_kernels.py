"""Kernels that touch one element too many, to prove that the guard pages see it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonnage.kernels.spec import Axes, Inputs, KernelSpec, Outputs


@triton.jit
def shifted_copy(source, target, count, read_shift, write_shift, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(source + at + read_shift, mask=at < count)
    tl.store(target + at + write_shift, values, mask=at < count)


def make_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return a source tensor."""
    generator = torch.Generator(device).manual_seed(seed)
    return {"source": torch.randn(axes["count"], generator=generator, device=device)}


def reference(inputs: Inputs) -> Outputs:
    """Return whatever the kernel writes: only the accesses are on trial."""
    return {"target": inputs["source"]}


def copy_with(read_shift: int, write_shift: int, inputs: Inputs) -> Outputs:
    """Copy, reading and writing the given number of elements off."""
    source = inputs["source"]
    target = torch.empty_like(source)
    shifted_copy[(1,)](source, target, source.numel(), read_shift, write_shift, BLOCK=64)
    return {"target": target}


def sound(inputs: Inputs) -> Outputs:
    """Copy."""
    return copy_with(0, 0, inputs)


def read_after(inputs: Inputs) -> Outputs:
    """Read one element past the end."""
    return copy_with(1, 0, inputs)


def read_before(inputs: Inputs) -> Outputs:
    """Read one element before the start."""
    return copy_with(-1, 0, inputs)


def write_after(inputs: Inputs) -> Outputs:
    """Write one element past the end of the output."""
    return copy_with(0, 1, inputs)


def write_before(inputs: Inputs) -> Outputs:
    """Write one element before the start of the output."""
    return copy_with(0, -1, inputs)


def spec_of(name: str) -> KernelSpec:
    """Describe one of the copies as a kernel; any values are right, none may be missing."""
    return KernelSpec(
        name=name,
        summary="copy",
        axes={"count": "elements"},
        flops=lambda axes: 0.0,
        bytes=lambda axes: 8.0 * axes["count"],
        inputs=f"{__name__}:make_inputs",
        reference_function=f"{__name__}:reference",
        runs={"triton": f"{__name__}:{name}"},
        tolerances={"target": 0.0 if name == "sound" else float("inf")},
        examples=({"count": 63},),
    )


NAMES = ("sound", "read_after", "read_before", "write_after", "write_before")
FAULTY = {name: spec_of(name) for name in NAMES}
