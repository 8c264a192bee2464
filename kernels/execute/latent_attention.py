"""Latent attention of a layer on one rank: absorbed for decode, decompressed for prefill."""

from __future__ import annotations

import torch

from tonnage.kernels.execute.attention import (
    Angles,
    AttentionBlock,
    Parts,
    batched,
    batched_type,
    decode_tables,
    put,
)
from tonnage.kernels.execute.batch import Batch, ChunkRows, DecodeRows
from tonnage.kernels.execute.pages import LayerCache
from tonnage.kernels.execute.small_ops import causal, rms_norm, rotated
from tonnage.kernels.paged_inputs import E4M3
from tonnage.sim.domain import MlaAttention


class MlaBlock(AttentionBlock):
    """Latent attention: absorbed for decode, decompressed for prefill, as engines run it.

    `w_key` `[heads, nope, latent]` and `w_value` `[heads, latent, value]` are kv_b_proj rearranged,
    what turns a query into the latent's space, and an attended latent into values.
    """

    def __init__(self, parts: Parts, attention: MlaAttention) -> None:
        super().__init__(parts, (attention.nope_dim + attention.rope_dim) ** -0.5)
        self._shape = attention
        device = parts.place.device
        self._q_norm = torch.ones(attention.q_lora_rank or 0, dtype=torch.bfloat16, device=device)
        self._kv_norm = torch.ones(attention.kv_lora_rank, dtype=torch.bfloat16, device=device)
        values = parts.products["kv_b_proj"].weight.values
        assert values is not None
        rows = values.bfloat16().view(parts.heads, -1, attention.kv_lora_rank)
        rows = rows.to(batched_type(device))
        self._w_key = rows[:, : attention.nope_dim].contiguous()
        self._w_value = rows[:, attention.nope_dim :].mT.contiguous()

    @property
    def bytes(self) -> int:
        """Return the bytes of its matrices, the rearranged ones too."""
        rearranged = self._w_key.numel() + self._w_value.numel()
        return super().bytes + rearranged * self._w_key.element_size()

    def __call__(
        self, x: torch.Tensor, angles: Angles, batch: Batch, cache: LayerCache
    ) -> torch.Tensor:
        """Project, rotate, write, attend, project."""
        parts, marks, shape = self.parts, self.parts.marks, self._shape
        queries, latents, rope_keys = self._projected(x)
        turned = rotated(queries[..., shape.nope_dim :], angles)
        rope_keys = rotated(rope_keys[:, None], angles)[:, 0]
        marks.mark("norms and rope")
        self._write(latents, rope_keys, batch.slots, cache)
        marks.mark("KV write")
        plain = queries[..., : shape.nope_dim]
        outs, decodes = [], 0
        if batch.decode is not None:
            decodes = batch.decode.requests
            outs.append(self._decode(plain[:decodes], turned[:decodes], batch.decode, cache))
        if batch.prefill is not None:
            whole = torch.cat((plain[decodes:], turned[decodes:]), -1)
            new = torch.cat((latents[decodes:], rope_keys[decodes:]), -1)
            outs.append(self._prefill(whole, new, batch.prefill, cache))
        attended = outs[0] if len(outs) == 1 else torch.cat(outs)
        out = parts.products["o_proj"](attended.flatten(1))
        marks.mark("attention products")
        return out

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries `[rows, heads, nope + rope]`, normed latents and rope keys of the rows."""
        parts, shape = self.parts, self._shape
        if shape.q_lora_rank is None:
            queries = parts.products["q_proj"](x)
            down = parts.products["kv_a_proj_with_mqa"](x)
            parts.marks.mark("attention products")
        else:
            names = ("fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa")
            low, down = parts.joined(names, x).split(
                (shape.q_lora_rank, shape.kv_lora_rank + shape.rope_dim), -1
            )
            parts.marks.mark("attention products")
            low = rms_norm(low.contiguous(), self._q_norm)
            parts.marks.mark("norms and rope")
            queries = parts.products["q_b_proj"](low)
            parts.marks.mark("attention products")
            for product in parts.indexer:  # its results would select tokens
                product(low if product.weight.shape[-1] == shape.q_lora_rank else x)
                parts.marks.mark("indexer products")
        latents, rope_keys = down.split((shape.kv_lora_rank, shape.rope_dim), -1)
        latents = rms_norm(latents.contiguous(), self._kv_norm)
        return queries.view(len(x), parts.heads, -1), latents, rope_keys.contiguous()

    def _write(
        self, latents: torch.Tensor, rope_keys: torch.Tensor, slots: torch.Tensor, cache: LayerCache
    ) -> None:
        if self.parts.kv_format == "bf16":
            put(cache.latent, slots, torch.cat((latents, rope_keys), -1))
            return
        inputs = {"latents": latents, "rope_keys": rope_keys, "slots": slots}
        inputs |= {"cache": cache.latent, "scale": cache.scale}
        self.parts.place.run("mla_write_fp8", inputs)

    def _decode(
        self, plain: torch.Tensor, turned: torch.Tensor, decode: DecodeRows, cache: LayerCache
    ) -> torch.Tensor:
        marks = self.parts.marks
        absorbed = batched(plain, self._w_key)
        marks.mark("latent products")
        inputs = {
            "queries": torch.cat((absorbed, turned), -1),
            "cache": cache.latent,
            "cache_scale": cache.scale,
            "logit_scale": self.scale,
            **decode_tables(self._selected(decode)),
        }
        attended = self.parts.place.run(self.parts.kernel("mla_decode"), inputs)["output"]
        marks.mark("attention")
        out = batched(attended, self._w_value)
        marks.mark("latent products")
        return out

    def _selected(self, decode: DecodeRows) -> DecodeRows:
        """Return the tables with the first tokens alone where attention is sparse."""
        most = self._shape.sparse_top_k
        if most is None or decode.context_tokens_max <= most:
            return decode
        tokens = decode.context_tokens.clamp(max=most)
        return DecodeRows(decode.requests, decode.page_table, tokens, most)

    def _prefill(
        self, queries: torch.Tensor, new: torch.Tensor, chunks: ChunkRows, cache: LayerCache
    ) -> torch.Tensor:
        """Attend every chunk to its cached latents and its new ones, decompressed."""
        outs, start = [], 0
        for chunk, slots in zip(chunks.chunks, chunks.past_slots, strict=True):
            end = start + chunk.new_tokens
            rows = new[start:end]
            if chunk.past_tokens:
                rows = torch.cat((cached_rows(cache, slots), rows))
            keys, values = self._decompressed(rows)
            self.parts.marks.mark("latent products")
            outs.append(causal(queries[start:end], keys, values, self.scale))
            self.parts.marks.mark("attention")
            start = end
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _decompressed(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys `[tokens, heads, nope + rope]` and values of latent rows."""
        shape = self._shape
        latents = rows[:, : shape.kv_lora_rank].contiguous()
        opened = self.parts.products["kv_b_proj"](latents).view(len(rows), self.parts.heads, -1)
        plain, values = opened.split((shape.nope_dim, shape.value_dim), -1)
        rope_keys = rows[:, None, shape.kv_lora_rank :].expand(-1, self.parts.heads, -1)
        return torch.cat((plain, rope_keys), -1), values


def cached_rows(cache: LayerCache, slots: torch.Tensor) -> torch.Tensor:
    """Return cached latents in BF16."""
    rows = cache.latent.flatten(0, 1)
    if rows.dtype != E4M3:
        return rows[slots]
    codes = rows.view(torch.uint8)[slots].view(E4M3)
    return (codes.float() * cache.scale).bfloat16()
