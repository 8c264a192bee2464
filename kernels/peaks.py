"""What a device was seen to reach at best: copying, and multiplying dense matrices.

Shares of these, not of a datasheet, say how good a kernel is: they were measured in the same
program, at the same clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonnage.kernels.cpu.linear import multiplies_bf16
from tonnage.kernels.provenance import Provenance
from tonnage.kernels.quantise.fp8 import quantise_tensor
from tonnage.kernels.spec import Inputs
from tonnage.kernels.timing import Method, Run, Work, measure_work


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates of a device.

    The matrix rate is BF16's, or f32's on a CPU without BF16 instructions; FP8's is None where a
    device does not multiply it.
    """

    copy_bytes_per_s: float  # read and written bytes
    matrix_flops_per_s: float
    fp8_flops_per_s: float | None = None

    def shares(self, bytes_per_s: float, flops_per_s: float, fp8: bool) -> tuple[float, float]:
        """Return what shares of the copy's and the matrix rate something reached."""
        matrix = self.fp8_flops_per_s if fp8 and self.fp8_flops_per_s else self.matrix_flops_per_s
        return bytes_per_s / self.copy_bytes_per_s, flops_per_s / matrix


def measured_peaks(method: Method, origin: Provenance, side: int, copied_bytes: int) -> Peaks:
    """Measure copies of so many bytes and products of square matrices of that side."""
    random = torch.Generator(method.device).manual_seed(method.seed)
    shape, device = (side, side), method.device
    x, w = (torch.randn(shape, generator=random, device=device) for _ in range(2))
    source = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    flops = 2.0 * side**3

    def rate(kernel: str, run: Run, inputs: Inputs, amount: float) -> float:
        work = Work(kernel, "torch", {}, amount, 0.0)
        return measure_work(work, run, inputs, method, origin).flops_per_s

    copies = {"source": source, "target": target}
    # a CPU is at its best in f32 unless it multiplies BF16
    narrow = method.on_gpu or multiplies_bf16()
    operands = {"x": x.bfloat16(), "w": w.bfloat16()} if narrow else {"x": x, "w": w}
    return Peaks(
        rate("copy", lambda one: one["target"].copy_(one["source"]), copies, 2.0 * copied_bytes),
        rate("mm", lambda one: torch.mm(one["x"], one["w"].mT), operands, flops),
        rate("scaled_mm", scaled_mm, fp8_operands(x, w), flops) if _fp8(method) else None,
    )


def fp8_operands(x: torch.Tensor, w: torch.Tensor) -> Inputs:
    """Return two matrices in e4m3 with a scale each, for `scaled_mm`."""
    (x8, x_scale), (w8, w_scale) = quantise_tensor(x), quantise_tensor(w)
    return {"x": x8, "w": w8, "x_scale": x_scale, "w_scale": w_scale}


def scaled_mm(inputs: Inputs) -> torch.Tensor:
    """Multiply e4m3 by e4m3 with a scale per tensor through cuBLAS."""
    scales = {f"scale_{side}": inputs[f"{name}_scale"] for side, name in (("a", "x"), ("b", "w"))}
    out: torch.Tensor = torch._scaled_mm(
        inputs["x"], inputs["w"].mT, **scales, out_dtype=torch.bfloat16
    )
    return out


def _fp8(method: Method) -> bool:
    return method.on_gpu and torch.cuda.get_device_capability(method.device) >= (8, 9)
