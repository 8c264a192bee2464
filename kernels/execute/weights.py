"""Random weights in a stored format, packed once for the kernels of a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonnage.kernels.execute.formats import DENSE_FORMATS, FP8_SCALES, INT4_GROUPS
from tonnage.kernels.execute.place import Place
from tonnage.kernels.quantise import fp8
from tonnage.kernels.quantise.groups import in_groups
from tonnage.kernels.quantise.int4 import SYMMETRIC_ZERO
from tonnage.kernels.registry import kernel
from tonnage.kernels.spec import Inputs

LEVEL_STD = 4.32  # of levels drawn evenly from -7..7


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix `[n, k]` or a stack `[experts, n, k]` as kernels read it.

    `inputs` are a kernel's, without what changes from call to call. `values` f32 are what the
    stored weight stands for, where they were asked for.
    """

    kernel: str  # its name without the `moe_` of a stack
    inputs: Inputs
    shape: tuple[int, ...]
    values: torch.Tensor | None

    @property
    def bytes(self) -> int:
        """Return the bytes held, every layout of the backend counted."""
        return sum(t.numel() * t.element_size() for t in self.inputs.values() if torch.is_tensor(t))


def random_weight(
    shape: tuple[int, ...], weight_format: str, place: Place, keep_values: bool = False
) -> Weight:
    """Draw a weight whose products with unit rows are unit rows: standard deviation k^-0.5."""
    if weight_format in DENSE_FORMATS:
        w = place.normal(*shape, std=shape[-1] ** -0.5)
        return Weight("gemm_bf16", {"w": w}, shape, w.float() if keep_values else None)
    if weight_format in FP8_SCALES:
        return _fp8(shape, weight_format, place, keep_values)
    return _int4(shape, weight_format, place, keep_values)


def _fp8(shape: tuple[int, ...], weight_format: str, place: Place, keep_values: bool) -> Weight:
    values = place.normal(*shape, std=shape[-1] ** -0.5)
    if weight_format == "fp8_block":
        codes, scale = fp8.quantise_blocks(values)
    elif weight_format == "fp8_channel":
        codes, scale = fp8.quantise_rows(values)
    else:
        whole = (values.abs().amax((-2, -1), keepdim=True).float() / fp8.E4M3_MAX)[..., 0]
        scale = whole.expand(shape[:-1]).contiguous()
        codes = fp8.to_e4m3(values.float() / scale[..., None])
    scales = FP8_SCALES[weight_format]
    kept = None
    if keep_values:
        back = fp8.dequantise_blocks if scales == "block" else fp8.dequantise_rows
        kept = back(codes, scale)
    return Weight(f"gemm_fp8_{scales}", {"w": codes, "w_scale": scale}, shape, kept)


def _int4(shape: tuple[int, ...], weight_format: str, place: Place, keep_values: bool) -> Weight:
    group, k = INT4_GROUPS[weight_format], shape[-1]
    random, device = place.random, place.device
    levels = torch.randint(1, 16, shape, dtype=torch.uint8, generator=random, device=device)
    spread = torch.rand((*shape[:-1], k // group), generator=random, device=device) + 0.5
    scales = (spread * (k**-0.5 / LEVEL_STD)).bfloat16()
    made: Inputs = {"levels": levels, "scales": scales}
    values = None
    if keep_values:
        centred = in_groups(levels.float(), group) - SYMMETRIC_ZERO
        values = (centred * scales.float()[..., None]).flatten(-2)
    name = f"gemm_int4_g{group}"
    # routing and counters belong to a call: made here of nothing, and made again at every call
    made |= {"x": scales.new_empty((1, k)), "expert_ids": _first_expert(place)}
    spec = kernel(f"moe_{name}" if len(shape) == 3 else name)
    prepared = spec.prepare(made, place.backend)
    packed = {key: prepared[key] for key in prepared if key.startswith(("packed", "cpu_"))}
    return Weight(name, packed, shape, values)


def _first_expert(place: Place) -> torch.Tensor:
    return torch.zeros((1, 1), dtype=torch.int32, device=place.device)
