"""The attention of each kind of layer of a pool, in decode and prefill, from measured kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.sim.cost.engine_terms import KERNELS_ALONE, EngineTerms
from tonnage.sim.cost.estimate import Estimate
from tonnage.sim.cost.models.attention import AttentionShape, attention_shape
from tonnage.sim.cost.operator_models import OperatorModels
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.operators import decode_reads
from tonnage.sim.domain import (
    FloatArray,
    GpuSpec,
    GqaAttention,
    LayerSpec,
    LinearAttention,
    MlaAttention,
    ModelSpec,
    ParallelLayout,
    PromptChunk,
    Role,
)

_KERNELS = 4  # small ones around an attention kernel: rope, norms of q and k, KV write ...
_FP8_KV_KERNELS = 4  # more of them: quantise, casts, the scale (SGLang 0.5.14, no k_scale)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """All layers of one kind: `layers` calls of one rank's attention.

    `covers_projections`: the measured rows hold the projections, norms and the KV write too.
    """

    name: str
    shape: AttentionShape
    layers: int
    window_tokens: int | None
    models: OperatorModels
    context_ranks: int  # decode context parallelism: each rank reads its share of a context
    arithmetic_share: float  # of the larger of reading and computing, for one query per request
    decode_family: str = ""  # in the engine's terms, and what they make of its time
    prefill_family: str = ""
    decode_factor: float = 1.0
    prefill_factor: float = 1.0

    @property
    def covers_projections(self) -> bool:
        """Whether a row is a whole module."""
        return self.models.decode.content(self.shape) == "module"

    @property
    def small_kernels(self) -> int:
        """Small kernels of one layer that no row holds."""
        if self.covers_projections:
            return 0
        is_fp8 = self.shape.kv_format != "bf16"
        return _KERNELS + (_FP8_KV_KERNELS if is_fp8 else 0)

    def decode_s(self, batch: int, contexts: FloatArray, query_tokens: int) -> FloatArray:
        """Return the seconds of all layers at mean contexts `[steps]`."""
        curve = self.models.decode.curve(self.shape, batch)
        if self.context_ranks > 1:
            contexts = contexts / self.context_ranks
        factor = self.decode_factor * self.layers * self._query_factor(query_tokens)
        return curve.seconds_at(contexts) * factor

    def decode_time(self, batch: int, context_tokens: float, query_tokens: int) -> OperatorTime:
        """Return all layers at one context, with provenance."""
        factor = self.decode_factor * self.layers * self._query_factor(query_tokens)
        estimate = self._decode(batch, np.array([context_tokens]))
        name = f"decode_{self.name}"
        return OperatorTime.of(name, _single(estimate), factor, self.decode_family)

    def prefill_s(self, chunks: Sequence[PromptChunk]) -> float:
        """Return the seconds of all layers for the prompt chunks of one step."""
        pairs = tuple((chunk.new_tokens, chunk.past_tokens) for chunk in chunks)
        factor = self.prefill_factor * self.layers
        return factor * self.models.prefill.chunks_s(self.shape, pairs)

    def prefill_time(self, chunks: Sequence[PromptChunk]) -> OperatorTime:
        """Return all layers for the prompt chunks of one step, with provenance."""
        pairs = tuple((chunk.new_tokens, chunk.past_tokens) for chunk in chunks)
        estimate = self.models.prefill.chunks(self.shape, pairs)
        factor = self.prefill_factor * self.layers
        name = f"prefill_{self.name}"
        return OperatorTime.of(name, _single(estimate), factor, self.prefill_family)

    def _decode(self, batch: int, contexts: FloatArray) -> Estimate:
        curve = self.models.decode.curve(self.shape, batch)
        return curve.at(contexts / self.context_ranks)

    def _query_factor(self, query_tokens: int) -> float:
        """Return how much longer several queries of a request take that share one read."""
        return max(1.0, query_tokens * self.arithmetic_share)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """All linear-attention layers of one kind, whose time does not depend on the context."""

    name: str
    kind: str
    heads: int  # of one rank
    layers: int
    models: OperatorModels
    window_tokens: int | None = None
    covers_projections: bool = False
    small_kernels: int = _KERNELS
    decode_family: str = ""
    prefill_family: str = ""
    decode_factor: float = 1.0
    prefill_factor: float = 1.0

    def decode_s(self, batch: int, contexts: FloatArray, query_tokens: int) -> FloatArray:
        """Return the seconds of all layers at every one of the contexts."""
        return np.full(len(contexts), self.decode_time(batch, 0.0, query_tokens).seconds)

    def decode_time(self, batch: int, context_tokens: float, query_tokens: int) -> OperatorTime:
        """Return all layers, with provenance; several queries go through one after the other."""
        estimate = self.models.linear.decode(self.kind, self.heads, batch)
        factor = self.decode_factor * self.layers * query_tokens
        name = f"decode_{self.name}"
        return OperatorTime.of(name, _single(estimate), factor, self.decode_family)

    def prefill_s(self, chunks: Sequence[PromptChunk]) -> float:
        """Return the seconds of all layers for prompt chunks of about one length."""
        return self.prefill_time(chunks).seconds

    def prefill_time(self, chunks: Sequence[PromptChunk]) -> OperatorTime:
        """Return all layers for prompt chunks of about one length, with provenance."""
        mean = sum(chunk.new_tokens for chunk in chunks) / len(chunks)
        estimate = self.models.linear.prefill(self.kind, self.heads, mean, len(chunks))
        factor = self.prefill_factor * self.layers
        name = f"prefill_{self.name}"
        return OperatorTime.of(name, _single(estimate), factor, self.prefill_family)


def layer_attentions(
    model: ModelSpec,
    layout: ParallelLayout,
    gpu: GpuSpec,
    kv_format: str,
    models: OperatorModels,
    terms: EngineTerms = KERNELS_ALONE,
) -> list[LayerAttention | LayerStates]:
    """Return the attention of every kind of layer, as an engine's terms have it."""
    found: list[LayerAttention | LayerStates] = []
    counts = Counter(
        (layer.attention, _projection_format(layer)) for layer in model.layers if layer.attention
    )
    for (attention, projection_format), layers in counts.items():
        if isinstance(attention, LinearAttention):
            heads = max(1, attention.heads // layout.attention_tp)
            name, kind = f"{attention.kind}_attention", attention.kind
            states = LayerStates(name, kind, heads, layers, models, **_in_terms(terms, kind))
            found.append(states)
            continue
        shape = attention_shape(attention, layout, kv_format, projection_format, model.hidden_size)
        window = attention.window_tokens if isinstance(attention, GqaAttention) else None
        name = f"{shape.kind}_attention" + ("_window" if window is not None else "")
        share = _arithmetic_share(attention, layout, gpu, kv_format)
        kind = name.replace("_attention", "") + ("_fp8" if kv_format != "bf16" else "")
        found.append(
            LayerAttention(
                *(name, shape, layers, window, models, layout.dcp, share), **_in_terms(terms, kind)
            )
        )
    return found


def _in_terms(terms: EngineTerms, kind: str) -> dict[str, Any]:
    """Return the families of a kind of attention, and their factors."""
    decode, prefill = f"decode.{kind}", f"prefill.{kind}"
    return {
        "decode_family": decode,
        "prefill_family": prefill,
        "decode_factor": terms.factor(decode),
        "prefill_factor": terms.factor(prefill),
    }


def _projection_format(layer: LayerSpec) -> str:
    formats = [one.format for one in layer.weights if one.role is Role.ATTENTION]
    return formats[0] if formats else "bf16"


def _arithmetic_share(
    attention: GqaAttention | MlaAttention, layout: ParallelLayout, gpu: GpuSpec, kv_format: str
) -> float:
    """Return computing over the larger of reading and computing, by the datasheet."""
    read = decode_reads(attention, layout, kv_format)[0]
    if read.per_query:
        return 1.0
    reading_s = read.bytes_per_token / gpu.memory_bandwidth_bytes_per_s
    computing_s = read.flops_per_token / gpu.dense_flops_per_s["bf16"]
    return computing_s / max(reading_s, computing_s)


def _single(estimate: Estimate) -> Estimate:
    """Return an estimate of one point as plain numbers."""
    return Estimate(
        float(np.asarray(estimate.seconds).ravel()[0]),
        estimate.low,
        estimate.high,
        estimate.source,
        estimate.inside,
        float(np.asarray(estimate.roofline_s).ravel()[0]),
    )
