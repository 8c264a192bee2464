"""Writes to and copies between paged caches on a CPU. Layouts as in `ops.cache_write`."""

from __future__ import annotations

import torch

from tonnage.kernels.cpu.pages import quantise, rows_of, slots_of, write_rows
from tonnage.kernels.ops.cache_write_reference import FLOAT_MIN, TILE
from tonnage.kernels.paged_inputs import E4M3, E4M3_MAX
from tonnage.kernels.spec import Inputs, Outputs


def write_gqa(inputs: Inputs) -> Outputs:
    """Quantise and write keys and values."""
    for name in ("key", "value"):
        codes = quantise(inputs[f"{name}s"], inputs[f"{name}_scale"])
        write_rows(inputs[f"{name}_cache"], inputs["slots"], codes)
    return {name: inputs[name] for name in ("key_cache", "value_cache")}


def write_mla(inputs: Inputs) -> Outputs:
    """Quantise and write rows of latent and rope key with one scale."""
    rows = torch.cat((inputs["latents"], inputs["rope_keys"]), -1)
    write_rows(inputs["cache"], inputs["slots"], quantise(rows, inputs["scale"]))
    return {"cache": inputs["cache"]}


def write_dsa(inputs: Inputs) -> Outputs:
    """Quantise every 128 latent numbers by their own largest and write 656-byte rows."""
    tiles = inputs["latents"].float().unflatten(-1, (-1, TILE))
    scales = (tiles.abs().amax(-1) / E4M3_MAX).clamp_min_(FLOAT_MIN)
    codes = quantise(tiles, scales[..., None]).flatten(1)
    parts = (codes, scales, inputs["rope_keys"])
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    write_rows(inputs["cache"], inputs["slots"], rows)
    return {"cache": inputs["cache"]}


def copy(inputs: Inputs) -> Outputs:
    """Copy every request's tokens to the target's pages, quantising where it is e4m3."""
    source, target = inputs["source"], inputs["target"]
    position = torch.arange(inputs["tokens_max"]).expand(len(inputs["tokens"]), -1)
    kept = position < inputs["tokens"][:, None]
    last = (inputs["tokens"].long() - 1).clamp_min(0)[:, None]
    position = position.minimum(last)  # a table need not reach beyond its own tokens
    at = slots_of(inputs["source_table"], position, source.shape[1])[kept]
    to = slots_of(inputs["target_table"], position, target.shape[1])[kept]
    rows = rows_of(source).index_select(0, at)
    if target.dtype == E4M3:
        rows = quantise(rows.view(torch.bfloat16), inputs["scale"])
    write_rows(target, to, rows)
    return {"target": target}
