"""The attention block of a layer on one rank, from normed rows to its output projection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tonnage.kernels.cpu.linear import multiplies_bf16
from tonnage.kernels.execute.batch import Batch, DecodeRows
from tonnage.kernels.execute.formats import KV_SUFFIX
from tonnage.kernels.execute.marks import Marks
from tonnage.kernels.execute.pages import LayerCache
from tonnage.kernels.execute.place import Place
from tonnage.kernels.execute.products import Product
from tonnage.kernels.execute.small_ops import rms_norm, rotated
from tonnage.sim.domain import GqaAttention

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What an attention block is built from."""

    place: Place
    marks: Marks
    kv_format: str
    heads: int  # of the rank
    kv_heads: int
    products: dict[str, Product]
    indexer: tuple[Product, ...] = ()

    def joined(self, names: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        """Multiply by products that share an input, whether or not they are one."""
        outs = [self.products[name](x) for name in names if name in self.products]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def drop_values(self, name: str) -> None:
        """Forget what a weight stands for, once it was rearranged."""
        product = self.products[name]
        self.products[name] = replace(product, weight=replace(product.weight, values=None))

    def kernel(self, name: str) -> str:
        """Return the kernel of that name for the format of the cache."""
        return f"{name}_{KV_SUFFIX[self.kv_format]}"


def put(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write BF16 rows to their slots as they are."""
    cache.view(-1, rows.shape[1:].numel()).index_copy_(0, slots, rows.flatten(1))


class AttentionBlock(ABC):
    """Computes new keys and values, writes them to the cache and attends."""

    def __init__(self, parts: Parts, scale: float) -> None:
        self.parts = parts
        self.scale = scale

    @property
    def bytes(self) -> int:
        """Return the bytes of its matrices."""
        products = (*self.parts.products.values(), *self.parts.indexer)
        return sum(product.weight.bytes for product in products)

    @abstractmethod
    def __call__(
        self, x: torch.Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> torch.Tensor:
        """Return what the block adds to the residual stream, `[rows, hidden]`."""


class GqaBlock(AttentionBlock):
    """Grouped-query attention; norms of queries and keys where the model has them."""

    def __init__(self, parts: Parts, attention: GqaAttention, has_head_norms: bool) -> None:
        super().__init__(parts, attention.head_dim**-0.5)
        self._dim = attention.head_dim
        ones = torch.ones(self._dim, dtype=torch.bfloat16, device=parts.place.device)
        self.norm = ones if has_head_norms else None

    def __call__(
        self, x: torch.Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> torch.Tensor:
        """Project, rotate, write, attend, project."""
        parts, marks = self.parts, self.parts.marks
        heads, kv_heads = parts.heads, parts.kv_heads
        joined = parts.joined(("qkv_proj", "q_proj", "k_proj", "v_proj"), x)
        marks.mark("attention products")
        by_head = joined.view(len(x), heads + 2 * kv_heads, self._dim)
        turned = by_head[:, : heads + kv_heads]
        if self.norm is not None:
            turned = rms_norm(turned, self.norm)
        turned = rotated(turned, angles)
        queries, keys = turned[:, :heads].contiguous(), turned[:, heads:].contiguous()
        marks.mark("norms and rope")
        self._write(keys, by_head[:, heads + kv_heads :].contiguous(), batch.slots, cache)
        marks.mark("KV write")
        attended = self._attend(queries, batch, cache)
        marks.mark("attention")
        out = parts.products["o_proj"](attended.flatten(1))
        marks.mark("attention products")
        return out

    def _write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, cache: LayerCache
    ) -> None:
        if self.parts.kv_format == "bf16":
            for part, rows in zip(cache.parts, (keys, values), strict=True):
                put(part, slots, rows)
            return
        key_cache, value_cache = cache.parts
        inputs = {"keys": keys, "values": values, "slots": slots}
        inputs |= {"key_cache": key_cache, "value_cache": value_cache}
        inputs |= {"key_scale": cache.scale, "value_scale": cache.scale}
        self.parts.place.run("gqa_write_fp8", inputs)

    def _attend(self, queries: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        key_cache, value_cache = cache.parts
        stored = {"key_cache": key_cache, "value_cache": value_cache}
        stored |= {"key_scale": cache.scale, "value_scale": cache.scale}
        outs, decodes = [], 0
        if batch.decode is not None:
            decodes = batch.decode.requests
            inputs = {"queries": queries[:decodes], **stored, **decode_tables(batch.decode)}
            outs.append(self.parts.place.run(self.parts.kernel("gqa_decode"), inputs)["output"])
        if batch.prefill is not None:
            chunks = batch.prefill
            inputs = {"queries": queries[decodes:], **stored, "query_start": chunks.query_start}
            inputs |= {"page_table": chunks.page_table, "context_tokens": chunks.context_tokens}
            inputs |= {"new_tokens_max": chunks.new_tokens_max}
            outs.append(self.parts.place.run(self.parts.kernel("gqa_prefill"), inputs)["output"])
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def decode_tables(decode: DecodeRows) -> dict[str, torch.Tensor | int]:
    """Return what decode kernels are told about their requests."""
    return {
        "page_table": decode.page_table,
        "context_tokens": decode.context_tokens,
        "context_tokens_max": decode.context_tokens_max,
    }


def batched(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply `[rows, heads, k]` by each head's `[k, n]`: `[rows, heads, n]`."""
    out = torch.bmm(x.transpose(0, 1).to(weights.dtype), weights)
    return out.transpose(0, 1).to(x.dtype).contiguous()


def batched_type(device: str) -> torch.dtype:
    """Return the type that batched products run in: BF16, but f32 on a CPU that lacks it."""
    if torch.device(device).type == "cpu" and not multiplies_bf16():
        return torch.float32
    return torch.bfloat16
