"""Seconds that attention takes on one attention-DP rank, from the GPU's datasheet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.sim.cost.operators import (
    AttentionKind,
    ReadCost,
    attention_kinds,
    causal_pairs,
    decode_reads,
    prefill_pair_flops,
    state_traffic_bytes,
)
from tonnage.sim.domain import (
    FloatArray,
    GpuSpec,
    IntArray,
    LinearAttention,
    ModelSpec,
    ParallelLayout,
    PromptChunk,
)


@dataclass(frozen=True, slots=True)
class DecodeTerms:
    """Seconds of all layers per token of context, per token up to a limit, per request."""

    context_token_s: float
    limited: tuple[tuple[float, int], ...]  # (seconds per token read, most tokens read)
    request_s: float


class AttentionTimes:
    """Roofline of the attention of one rank; it computes in BF16 whatever the KV format."""

    def __init__(
        self, model: ModelSpec, layout: ParallelLayout, gpu: GpuSpec, kv_format: str
    ) -> None:
        self._layout = layout
        self._kv_format = kv_format
        self._bandwidth_bytes_per_s = gpu.memory_bandwidth_bytes_per_s
        self._peak_flops_per_s = gpu.dense_flops_per_s["bf16"]
        self._kinds = attention_kinds(model.layers)
        self._prefill_parts = [self._prefill_part(kind) for kind in self._kinds]

    def decode_terms(self, query_tokens: int) -> DecodeTerms:
        """Return what decoding costs when every request computes so many tokens.

        The queries of a request share one read of its KV, except where each selects its own
        tokens; each computes its own products. States are read and written once.
        """
        full_s, request_s = 0.0, 0.0
        limited: defaultdict[int, float] = defaultdict(float)
        for kind in self._kinds:
            if isinstance(kind.attention, LinearAttention):
                moved_bytes = state_traffic_bytes(kind.attention, self._layout)
                request_s += kind.layers * moved_bytes / self._bandwidth_bytes_per_s
                continue
            for read in decode_reads(kind.attention, self._layout, self._kv_format):
                seconds = kind.layers * self._read_s(read, query_tokens)
                if read.limit_tokens is None:
                    full_s += seconds
                else:
                    limited[read.limit_tokens] += seconds
        return DecodeTerms(full_s, tuple((s, limit) for limit, s in limited.items()), request_s)

    def _read_s(self, read: ReadCost, query_tokens: int) -> float:
        reads = query_tokens if read.per_query else 1
        return max(
            reads * read.bytes_per_token / self._bandwidth_bytes_per_s,
            query_tokens * read.flops_per_token / self._peak_flops_per_s,
        )

    def prefill_s(self, chunks: Sequence[PromptChunk]) -> float:
        """Return the seconds of the prompt chunks of one rank."""
        held = sum(new + past for new, past in chunks)
        total_s = 0.0
        for part in self._prefill_parts:
            computed_s = sum(
                pair_s * sum(causal_pairs(new, past, limit) for new, past in chunks)
                for pair_s, limit in part.pairs_s
            )
            total_s += part.sequence_s * len(chunks) + max(part.held_token_s * held, computed_s)
        return total_s

    def _prefill_part(self, kind: AttentionKind) -> _PrefillPart:
        """Return what the layers of one kind cost in prefill, in seconds per unit of work."""
        bandwidth, peak = self._bandwidth_bytes_per_s, self._peak_flops_per_s
        if isinstance(kind.attention, LinearAttention):
            moved = state_traffic_bytes(kind.attention, self._layout)
            return _PrefillPart(kind.layers * moved / bandwidth, 0.0, ())
        reads = decode_reads(kind.attention, self._layout, self._kv_format)
        pairs = prefill_pair_flops(kind.attention, self._layout)
        return _PrefillPart(
            0.0,
            kind.layers * sum(read.bytes_per_token for read in reads) / bandwidth,
            tuple((kind.layers * flops / peak, limit) for flops, limit in pairs),
        )


@dataclass(frozen=True, slots=True)
class _PrefillPart:
    """Seconds of the layers of one kind: per sequence, per token of KV read, per query-key pair."""

    sequence_s: float
    held_token_s: float
    pairs_s: tuple[tuple[float, int | None], ...]


def limited_reads(
    contexts: IntArray, limit: int, growth_tokens: float, ramp: FloatArray
) -> FloatArray | float:
    """Return the tokens read in the steps of `ramp` when every read stops at `limit`.

    Each of `contexts` `[requests]` grows by `growth_tokens` per step until it reaches the limit.
    `ramp` `[steps]` counts the steps from 0; a constant stands for all of them.
    """
    if contexts.min() >= limit:
        return float(limit * len(contexts))
    if len(ramp) == 1:
        return float(np.minimum(contexts, limit).sum())
    ordered = np.sort(contexts)
    sums = np.zeros(len(ordered) + 1)
    np.cumsum(ordered, out=sums[1:])
    room = limit - growth_tokens * ramp
    below = ordered.searchsorted(room)  # contexts that still grow; the others read `limit`
    reads: FloatArray = sums[below] - room * below
    reads += limit * len(ordered)
    return reads
