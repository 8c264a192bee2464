"""One attention layer on FP8 pages: what it writes, and what a decode read of them gives."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.plain_model import normed, plain_attention, tiny, turned, values_of
from tests.kernels.test_executor import PAGE_TOKENS, rank_of, rms_error, runner_of
from tonnage.kernels.execute.attention import GqaBlock
from tonnage.kernels.execute.batch import Batch, make_batch
from tonnage.kernels.execute.build import Layer
from tonnage.kernels.execute.latent_attention import MlaBlock
from tonnage.kernels.execute.pages import HeldPages, LayerCache, PagedMemory
from tonnage.kernels.execute.rank import RankModel
from tonnage.kernels.execute.small_ops import rope_angles
from tonnage.sim.domain import MlaAttention, PromptChunk

TOKENS = 45
# BF16 rounds queries and the output, FP16 holds every code; logits are up to 10.
READ_ERROR = 0.02
# A code is off by at most 2^-4 of its number; most of it averages out over the tokens.
LAYER_ERROR = 0.05
Tensor = torch.Tensor


def sharpened(rank: RankModel) -> Layer:
    """Return the first layer, its logits four times as large, so that tokens differ in weight."""
    layer = rank.layers[0][0]
    block = layer.attention
    if isinstance(block, MlaBlock):
        weight = block.parts.products["q_b_proj"].weight
        assert weight.values is not None
        weight.inputs["w"].mul_(4)
        weight.values.mul_(4)
    else:
        assert isinstance(block, GqaBlock)
        assert block.norm is not None
        block.norm.mul_(2)
    return layer


def run_layer(layer: Layer, x: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
    return layer.attention(x, rope_angles(batch.positions, layer.rope_dim), batch, cache)


def written_and_read(
    rank: RankModel, layer: Layer, x: Tensor
) -> tuple[Tensor, PagedMemory, HeldPages]:
    """Prefill all rows but the last and decode it; return its output `[1, hidden]`."""
    memory = runner_of(rank).memory
    held = memory.open(TOKENS)
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    chunk = [(held, PromptChunk(TOKENS - 1, 0))]
    before = make_batch(memory, [], [], chunk, ids[:-1])
    run_layer(layer, x[:-1], before, memory.layers[0])
    step = make_batch(memory, [held], [TOKENS], [], ids[-1:])
    return run_layer(layer, x[-1:], step, memory.layers[0]), memory, held


def stored(memory: PagedMemory, held: HeldPages) -> list[Tensor]:
    """Return what the pages of a request hold, dequantised, f64 `[tokens, ...]` of each part."""
    cache, slots = memory.layers[0], memory.slots(held, 0, TOKENS)
    return [
        part.flatten(0, 1).float()[slots].double() * cache.scale.double() for part in cache.parts
    ]


def read(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend one token's `[heads, dim]` to `[tokens, heads, dim]`."""
    weights = (torch.einsum("hd,thd->ht", queries, keys) * scale).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values).flatten()[None]


def expected_mla(layer: Layer, attention: MlaAttention, x: Tensor, rows: Tensor) -> Tensor:
    """Return the block's output for the last row, from what is stored."""
    block = layer.attention
    products = block.parts.products
    assert attention.q_lora_rank is not None
    low = (x[-1:] @ values_of(products["fused_qkv_a_proj"]).T)[:, : attention.q_lora_rank]
    queries = (normed(low) @ values_of(products["q_b_proj"]).T).view(block.parts.heads, -1)
    latents, rope_keys = rows.split((512, 64), -1)
    opened = latents @ values_of(products["kv_b_proj"]).T
    opened = opened.view(TOKENS, block.parts.heads, -1)
    plain, values = opened.split((attention.nope_dim, attention.value_dim), -1)
    rope_queries = torch.zeros(TOKENS, block.parts.heads, 64, dtype=torch.float64)
    rope_queries[-1] = queries[:, attention.nope_dim :]
    queries = torch.cat((queries[:, : attention.nope_dim], turned(rope_queries)[-1]), -1)
    keys = torch.cat((plain, rope_keys[:, None].expand(-1, block.parts.heads, -1)), -1)
    return read(queries, keys, values, block.scale) @ values_of(products["o_proj"]).T


def expected_gqa(layer: Layer, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the block's output for the last row, from what is stored."""
    block = layer.attention
    products, heads = block.parts.products, block.parts.heads
    joined = (x @ values_of(products["qkv_proj"]).T).view(TOKENS, -1, 64)
    queries = 2 * turned(normed(joined[:, :heads]))[-1]
    shared = heads // block.parts.kv_heads
    keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
    return read(queries, keys, values, block.scale) @ values_of(products["o_proj"]).T


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_a_decode_read_of_fp8_pages_is_attention_to_what_they_hold(kind: str, backend: str) -> None:
    rank = rank_of(tiny(kind), "fp8_e4m3", backend)
    layer, attention = sharpened(rank), rank.groups[0].spec.attention
    x = rank.place.normal(TOKENS, 128)
    out, memory, held = written_and_read(rank, layer, x)
    parts = stored(memory, held)
    if isinstance(attention, MlaAttention):
        expected = expected_mla(layer, attention, x.double(), parts[0])
    else:
        expected = expected_gqa(layer, x.double(), *parts)
    assert rms_error(out, expected) < READ_ERROR


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_a_layer_on_fp8_pages_is_plain_attention_within_the_bound(kind: str, backend: str) -> None:
    rank = rank_of(tiny(kind), "fp8_e4m3", backend)
    layer = rank.layers[0][0]
    x = rank.place.normal(TOKENS, 128)
    out, memory, held = written_and_read(rank, layer, x)
    expected = plain_attention(layer, rank.groups[0].spec.attention, x.double())
    assert rms_error(out, expected[-1:]) < LAYER_ERROR
    if kind == "mla":
        down = x.double() @ values_of(layer.attention.parts.products["fused_qkv_a_proj"]).T
        latents = normed(down[:, 128:640])
        error = (stored(memory, held)[0][:, :512] - latents).abs()
        smallest_step = float(memory.layers[0].scale) * 2.0**-9
        # half a step of three mantissa bits, and BF16's own rounding before
        assert bool((error <= latents.abs() * (2.0**-4 + 2.0**-7) + smallest_step).all())


def test_pages_of_a_request_are_scattered() -> None:
    memory = runner_of(rank_of(tiny("gqa"))).memory
    held = memory.open(5 * PAGE_TOKENS)
    assert held.pages != sorted(held.pages)
    slots = memory.slots(held, 0, 5 * PAGE_TOKENS)
    assert len(slots.unique()) == 5 * PAGE_TOKENS
