"""Inputs and references of the FP8 cache writes; the same bytes are asked for.

Sources of the layouts: vLLM 0.24 csrc/cache_kernels.cu (one scale per tensor, `x / scale` cast
to nearest even and saturated; 656-byte rows with scale `max(amax / 448, FLT_MIN)` per 128),
FlashMLA README (512 e4m3, then 4 f32 scales, then 64 bf16).
"""

from __future__ import annotations

import torch

from tonnage.kernels.paged_inputs import (
    E4M3,
    E4M3_MAX,
    generator_of,
    quantised,
    random_slots,
)
from tonnage.kernels.spec import Axes, Inputs, Outputs

LATENT = 512
ROPE = 64
TILE = 128
FLOAT_MIN = torch.finfo(torch.float32).tiny
DSA_ROW_BYTES = LATENT + LATENT // TILE * 4 + ROPE * 2


def _slots(axes: Axes, random: torch.Generator) -> tuple[torch.Tensor, int]:
    pages = -(-axes["tokens"] // axes["page_tokens"]) + 2
    return random_slots(axes["tokens"], pages, axes["page_tokens"], random), pages


def _values(random: torch.Generator, *shape: int) -> torch.Tensor:
    # a wide spread, so that subnormal codes and saturation are met
    values = torch.randn(*shape, generator=random, device=random.device)
    wide = torch.exp2(4 * torch.randn(*shape[:-1], 1, generator=random, device=random.device))
    return (values * wide).bfloat16()


def make_gqa_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return keys and values `[tokens, kv_heads, head_dim]` bf16, slots, caches and scales."""
    random = generator_of(seed, device)
    slots, pages = _slots(axes, random)
    row = (axes["kv_heads"], axes["head_dim"])
    cache_shape = (pages, axes["page_tokens"], *row)
    inputs: Inputs = {"slots": slots}
    for name, scale in (("key", 0.03), ("value", 0.017)):
        inputs[f"{name}s"] = _values(random, axes["tokens"], *row)
        inputs[f"{name}_cache"] = torch.zeros(cache_shape, device=device).to(E4M3)
        inputs[f"{name}_scale"] = torch.tensor([scale], device=device)
    return inputs


def gqa_reference(inputs: Inputs) -> Outputs:
    """Quantise and write keys and values."""
    return {
        f"{name}_cache": written(
            inputs[f"{name}_cache"],
            inputs["slots"],
            quantised(inputs[f"{name}s"], inputs[f"{name}_scale"]),
        )
        for name in ("key", "value")
    }


def make_mla_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return latents `[tokens, 512]` and rope keys `[tokens, 64]` bf16, slots, cache and scale."""
    random = generator_of(seed, device)
    slots, pages = _slots(axes, random)
    cache = torch.zeros(pages, axes["page_tokens"], LATENT + ROPE, device=device).to(E4M3)
    return {
        "latents": _values(random, axes["tokens"], LATENT),
        "rope_keys": _values(random, axes["tokens"], ROPE),
        "slots": slots,
        "cache": cache,
        "scale": torch.tensor([0.02], device=device),
    }


def mla_reference(inputs: Inputs) -> Outputs:
    """Quantise and write rows of latent and rope key with one scale."""
    rows = torch.cat([inputs["latents"], inputs["rope_keys"]], -1)
    return {"cache": written(inputs["cache"], inputs["slots"], quantised(rows, inputs["scale"]))}


def make_dsa_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return the inputs of the 656-byte layout; the first token's latent is all zeros."""
    inputs = make_mla_inputs(axes, seed, device)
    pages = inputs["cache"].shape[0]
    inputs["latents"][0] = 0
    del inputs["scale"]
    shape = (pages, axes["page_tokens"], DSA_ROW_BYTES)
    inputs["cache"] = torch.zeros(shape, dtype=torch.uint8, device=device)
    return inputs


def dsa_reference(inputs: Inputs) -> Outputs:
    """Quantise every 128 latent numbers by their own largest and write 656-byte rows."""
    tiles = inputs["latents"].float().unflatten(-1, (-1, TILE))
    scales = (tiles.abs().amax(-1) / E4M3_MAX).clamp_min(FLOAT_MIN)
    codes = quantised(tiles, scales[..., None]).flatten(1)
    parts = (codes, scales, inputs["rope_keys"])
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    return {"cache": written(inputs["cache"], inputs["slots"], rows)}


def written(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of the cache with the rows of non-negative slots written."""
    result = cache.clone()
    kept = slots >= 0
    target = result.flatten(0, 1).view(torch.uint8)
    target[slots[kept]] = rows[kept].view(torch.uint8)
    return result
