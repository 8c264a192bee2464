"""Seconds of a step from the GPU's datasheet: a roofline per operator, provenance `datasheet`.

Each operator takes the larger of its bytes over the memory bandwidth and its FLOP over the dense
peak of its precision; collectives take their bytes over the link. There are no launch, latency or
engine overheads, and no efficiency below the peak: the result is a lower bound on the time.
Attention computes in BF16 whatever the KV format, and experts spread over ranks are charged an
all-reduce like any other block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tonnage.sim.cost.operators import (
    ACTIVATION_BYTES,
    AttentionKind,
    MatrixProduct,
    all_reduces,
    attention_kinds,
    causal_pairs,
    decode_reads,
    experts_touched,
    matrix_products,
    prefill_pair_flops,
    state_traffic_bytes,
)
from tonnage.sim.domain import (
    FloatArray,
    GpuSpec,
    IntArray,
    LinearAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    PromptChunk,
    Role,
    Step,
)
from tonnage.sim.model.formats import compute_format

_RAMP = np.arange(8192, dtype=np.float64)


class RooflineExecutor:
    """Predict the durations of steps of one instance; cheap enough to ask before every step.

    Requests are taken as spread evenly over the attention-DP ranks, and a step passes all pipeline
    stages one after the other.
    """

    def __init__(
        self,
        model: ModelSpec,
        layout: ParallelLayout,
        gpu: GpuSpec,
        kv_format: str,
        engine: str = "sglang",
    ) -> None:
        self._layout = layout
        self._gpu = gpu
        self._hidden_size = model.hidden_size
        self._products = list(matrix_products(model, layout, engine))
        self._moe = next((la.mlp for la in model.layers if isinstance(la.mlp, MoeMlp)), None)
        self._all_reduces = all_reduces(model, layout)
        self._kinds = attention_kinds(model.layers)
        self._kv_format = kv_format
        self._full_s_per_token, self._limited, self._state_s = self._decode_terms()
        self._prefill_parts = [self._prefill_part(kind) for kind in self._kinds]
        self._products_s = lru_cache(maxsize=65536)(self._products_seconds)

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        decodes = step.decode_requests
        chunks = step.prefill_chunks
        new_tokens = sum(chunk.new_tokens for chunk in chunks)
        fixed_s = self._products_s(decodes + new_tokens, decodes + len(chunks))
        if chunks:
            fixed_s += self._prefill_attention_s(chunks)
        if not decodes:
            return np.full(1, fixed_s)
        ramp = _RAMP[:max_steps]
        slope_s = self._full_s_per_token * decodes
        start_s = (
            fixed_s + self._full_s_per_token * step.decode_context_sum + self._state_s * decodes
        )
        seconds = start_s + slope_s * ramp
        for s_per_token, limit in self._limited:
            seconds += s_per_token * _limited_reads(step.decode_context_tokens, limit, len(ramp))
        return seconds

    def _products_seconds(self, tokens: int, outputs: int) -> float:
        """Return the time of all matrix products and collectives for a batch of `tokens`.

        Only the last token of each of `outputs` sequences goes through the head.
        """
        total_s = 0.0
        for product in self._products:
            role = product.tensor.role
            if role is Role.ROUTED_EXPERT:
                total_s += self._expert_seconds(product, tokens)
                continue
            rows = outputs if role in (Role.HEAD, Role.EMBEDDING) else tokens
            # What is split over more ranks than attention is, is given the rows of all of them.
            gathered = product.ways > self._layout.attention_tp
            rank_rows = rows if gathered else rows / self._layout.attention_dp
            total_s += product.count * self._product_seconds(product, rank_rows)
        return total_s + self._collective_seconds(tokens / self._layout.attention_dp)

    def _product_seconds(self, product: MatrixProduct, tokens: float) -> float:
        moved = product.weight_bytes + product.activation_bytes(tokens)
        return self._roofline(moved, 2 * tokens * product.parameters, product.tensor.format)

    def _expert_seconds(self, product: MatrixProduct, tokens: int) -> float:
        assert self._moe is not None
        share = experts_touched(self._moe, tokens) / self._moe.experts
        reached = tokens * self._moe.top_k / self._moe.experts  # tokens of each expert
        # One product per expert: `parameters` already holds all of the rank's experts.
        moved = product.weight_bytes * share
        moved += product.activation_bytes(reached * self._moe.experts / self._layout.ep)
        flops = 2 * reached * product.parameters
        return product.count * self._roofline(moved, flops, product.tensor.format)

    def _collective_seconds(self, tokens: float) -> float:
        """Return the time of the all-reduces: each moves 2 (n - 1) / n of its bytes per GPU."""
        ranks = self._layout.tp
        if ranks == 1:
            return 0.0
        message = tokens * self._hidden_size * ACTIVATION_BYTES
        return self._all_reduces * 2 * (ranks - 1) / ranks * message / self._link_bytes_per_s()

    def _link_bytes_per_s(self) -> float:
        if self._layout.tp > self._gpu.gpus_per_node:
            return self._gpu.network_bytes_per_s
        return self._gpu.nvlink_bytes_per_s or self._gpu.pcie_bytes_per_s

    def _roofline(self, moved_bytes: float, flops: float, weight_format: str) -> float:
        precision = compute_format(weight_format, self._gpu.dense_flops_per_s)
        return max(
            moved_bytes / self._gpu.memory_bandwidth_bytes_per_s,
            flops / self._gpu.dense_flops_per_s[precision],
        )

    def _decode_terms(self) -> tuple[float, list[tuple[float, int]], float]:
        """Return seconds per token read, the same where reads are limited, and per sequence."""
        bandwidth, peak = self._gpu.memory_bandwidth_bytes_per_s, self._attention_peak()
        # Contexts are summed over the instance; a rank reads those of its own requests.
        per_rank = 1 / self._layout.attention_dp
        full_s, state_s = 0.0, 0.0
        limited: list[tuple[float, int]] = []
        for kind in self._kinds:
            if isinstance(kind.attention, LinearAttention):
                moved = state_traffic_bytes(kind.attention, self._layout)
                state_s += per_rank * kind.layers * moved / bandwidth
                continue
            for read in decode_reads(kind.attention, self._layout, self._kv_format):
                seconds = max(read.bytes_per_token / bandwidth, read.flops_per_token / peak)
                seconds *= per_rank * kind.layers
                if read.limit_tokens is None:
                    full_s += seconds
                else:
                    limited.append((seconds, read.limit_tokens))
        return full_s, limited, state_s

    def _attention_peak(self) -> float:
        return self._gpu.dense_flops_per_s["bf16"]

    def _prefill_part(self, kind: AttentionKind) -> _PrefillPart:
        """Return what the layers of one kind cost in prefill, in seconds per unit of work."""
        bandwidth, peak = self._gpu.memory_bandwidth_bytes_per_s, self._attention_peak()
        scale = kind.layers / self._layout.attention_dp
        if isinstance(kind.attention, LinearAttention):
            moved = state_traffic_bytes(kind.attention, self._layout)
            return _PrefillPart(scale * moved / bandwidth, 0.0, ())
        reads = decode_reads(kind.attention, self._layout, self._kv_format)
        pairs = prefill_pair_flops(kind.attention, self._layout)
        return _PrefillPart(
            0.0,
            scale * sum(read.bytes_per_token for read in reads) / bandwidth,
            tuple((scale * flops / peak, limit) for flops, limit in pairs),
        )

    def _prefill_attention_s(self, chunks: tuple[PromptChunk, ...]) -> float:
        held = sum(new + past for new, past in chunks)
        total_s = 0.0
        for part in self._prefill_parts:
            computed_s = sum(
                pair_s * sum(causal_pairs(new, past, limit) for new, past in chunks)
                for pair_s, limit in part.pairs_s
            )
            total_s += part.sequence_s * len(chunks) + max(part.held_token_s * held, computed_s)
        return total_s


@dataclass(frozen=True, slots=True)
class _PrefillPart:
    """Seconds of the layers of one kind: per sequence, per token of KV read, per query-key pair."""

    sequence_s: float
    held_token_s: float
    pairs_s: tuple[tuple[float, int | None], ...]


def _limited_reads(contexts: IntArray, limit: int, steps: int) -> FloatArray:
    """Return the tokens read in each step `[steps]` when every read stops at `limit`.

    A context below the limit grows by one per step until it reaches it.
    """
    room = np.clip(limit - contexts, 0, steps)  # steps in which this context still grows
    growing = len(contexts) - np.bincount(room, minlength=steps + 1)[:steps].cumsum()
    grown = np.concatenate([[0], growing[: steps - 1].cumsum()])
    reads: FloatArray = float(np.minimum(contexts, limit).sum()) + grown.astype(np.float64)
    return reads
