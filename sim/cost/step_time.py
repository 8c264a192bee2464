"""Seconds of a step from the GPU's datasheet: a roofline per operator, provenance `datasheet`.

Each operator takes the larger of its bytes over the memory bandwidth and its FLOP over the dense
peak of its precision; collectives take their bytes over the link. There are no launch, latency or
engine overheads, and no efficiency below the peak: the result is a lower bound on the time.
Attention computes in BF16 whatever the KV format, and experts spread over ranks are charged an
all-reduce like any other block. docs/layouts.md says how each layout is charged.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import numpy as np

from tonnage.sim.cost.attention import AttentionTimes, DecodeTerms, limited_reads
from tonnage.sim.cost.collectives import collective_times
from tonnage.sim.cost.experts import busiest_rank_experts, busiest_rank_rows
from tonnage.sim.cost.operators import MatrixProduct, matrix_products
from tonnage.sim.domain import (
    FloatArray,
    GpuSpec,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    Role,
    Step,
)
from tonnage.sim.model.formats import compute_format

_RAMP = np.arange(8192, dtype=np.float64)


class RooflineExecutor:
    """Predict the durations of steps of one instance; cheap enough to ask before every step.

    A step passes all pipeline stages one after the other. A step of decoding requests alone is
    padded to the next of `captured_sizes` (requests of one attention-DP rank, rising), if there is
    one. A step without `ranks` is taken as spread evenly over the attention-DP ranks; with them the
    slowest rank sets the time of what each does alone.
    """

    def __init__(
        self,
        model: ModelSpec,
        layout: ParallelLayout,
        gpu: GpuSpec,
        kv_format: str,
        engine: str = "sglang",
        captured_sizes: tuple[int, ...] = (),
    ) -> None:
        self._layout = layout
        self._gpu = gpu
        self._captured_sizes = captured_sizes
        self._captured_most = captured_sizes[-1] if captured_sizes else 0
        self._products = list(matrix_products(model, layout, engine))
        self._moe = next((la.mlp for la in model.layers if isinstance(la.mlp, MoeMlp)), None)
        self._collectives = collective_times(model, layout, gpu, engine)
        self._attention = AttentionTimes(model, layout, gpu, kv_format)
        self._terms = lru_cache(maxsize=64)(self._decode_terms)
        self._products_s = lru_cache(maxsize=65536)(self._products_seconds)

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        if step.ranks:
            return self._run_ranks(step, max_steps)
        ranks, query = self._layout.attention_dp, step.query_tokens
        decodes, chunks = len(step.decode_context_tokens), step.prefill_chunks
        if chunks:
            rows = decodes * query + sum(chunk.new_tokens for chunk in chunks)
            outputs = decodes * query + len(chunks)
            fixed_s = self._products_s(rows, rows / ranks, rows, outputs / ranks, outputs)
            fixed_s += self._attention.prefill_s(chunks) / ranks
        else:
            fixed_s = self._decode_products_s(decodes, decodes / ranks, query)
        if not decodes:
            return np.full(1, fixed_s)
        terms, growth = self._terms(query), step.decode_context_growth
        start_s = terms.context_token_s * step.decode_context_sum + terms.request_s * decodes
        slope_s = terms.context_token_s * (decodes if growth is None else growth)
        ramp = _RAMP[:max_steps]
        seconds: FloatArray = (fixed_s + start_s / ranks) + slope_s / ranks * ramp
        for s_per_token, limit in terms.limited:
            seconds += s_per_token / ranks * _reads(step, limit, ramp)
        return seconds

    # --- attention-DP ranks in lockstep ---------------------------------------------------------

    def _run_ranks(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds `[max_steps]` of a step whose ranks wait for each other in each layer.

        What is split over more ranks than attention works on the rows of all ranks: padded to those
        of the fullest, or their sum when there are prompt chunks (SGLang's `DpPaddingMode`).
        """
        query, ranks = step.query_tokens, step.ranks
        if step.prefill_chunks:
            decoding = [len(rank.decode_context_tokens) * query for rank in ranks]
            prompts = [rank.prefill_chunks for rank in ranks]
            rows = [
                tokens + sum(chunk.new_tokens for chunk in chunks)
                for tokens, chunks in zip(decoding, prompts, strict=True)
            ]
            outputs = [
                tokens + len(chunks) for tokens, chunks in zip(decoding, prompts, strict=True)
            ]
            fixed_s = self._products_s(sum(rows), max(rows), sum(rows), max(outputs), sum(outputs))
            alone_s = np.array([self._attention.prefill_s(chunks) for chunks in prompts])
        else:
            fullest = max(len(rank.decode_context_tokens) for rank in ranks)
            fixed_s = self._decode_products_s(step.decode_requests, fullest, query)
            alone_s = np.zeros(len(ranks))
        if not step.decode_requests:
            return np.full(1, fixed_s + alone_s.max())
        decode_s = self._rank_decode_s(ranks, self._terms(query), _RAMP[:max_steps])
        slowest: FloatArray = (alone_s[:, None] + decode_s).max(axis=0)
        return fixed_s + slowest

    def _rank_decode_s(
        self, ranks: tuple[Step, ...], terms: DecodeTerms, ramp: FloatArray
    ) -> FloatArray:
        """Return the seconds `[ranks, steps]` of each rank's attention over its own requests."""
        requests = np.array([len(rank.decode_context_tokens) for rank in ranks])
        sums = np.array([rank.decode_context_sum for rank in ranks])
        growths = np.array([_growth(rank) for rank in ranks])
        start_s = terms.context_token_s * sums + terms.request_s * requests
        seconds: FloatArray = start_s[:, None] + (terms.context_token_s * growths)[:, None] * ramp
        for s_per_token, limit in terms.limited:
            for index, rank in enumerate(ranks):
                if requests[index]:
                    seconds[index] += s_per_token * _reads(rank, limit, ramp)
        return seconds

    # --- matrix products and collectives --------------------------------------------------------

    def _decode_products_s(self, requests: int, rank_requests: float, query: int) -> float:
        """Return the time of the products of a step without prompt chunks, padded.

        Verification scores every token, so each goes through the head.
        """
        if rank_requests <= self._captured_most:
            rank_requests = self._captured_sizes[bisect_left(self._captured_sizes, rank_requests)]
        rows = rank_requests * query
        gathered = rows * self._layout.attention_dp
        return self._products_s(requests * query, rows, gathered, rows, gathered)

    def _products_seconds(
        self,
        tokens: int,
        rank_rows: float,
        gathered_rows: float,
        rank_outputs: float,
        gathered_outputs: float,
    ) -> float:
        """Return the time of all matrix products and collectives.

        What is split over more ranks than attention is given the rows of all attention-DP ranks,
        the rest those of the fullest; of them so many `outputs` go through the head. Experts get
        the real `tokens`: rows of padding are all alike and reach few experts more.
        """
        total_s = 0.0
        for product in self._products:
            role = product.tensor.role
            if role is Role.ROUTED_EXPERT:
                total_s += self._expert_seconds(product, tokens)
                continue
            is_gathered = product.ways > self._layout.attention_tp
            if role in (Role.HEAD, Role.EMBEDDING):
                rows = gathered_outputs if is_gathered else rank_outputs
            else:
                rows = gathered_rows if is_gathered else rank_rows
            total_s += product.count * self._product_seconds(product, rows)
        total_s += self._collectives.rank_row_s * rank_rows
        return total_s + self._collectives.gathered_row_s * gathered_rows

    def _product_seconds(self, product: MatrixProduct, tokens: float) -> float:
        moved = product.weight_bytes + product.activation_bytes(tokens)
        return self._roofline(moved, 2 * tokens * product.parameters, product.tensor.format)

    def _expert_seconds(self, product: MatrixProduct, tokens: int) -> float:
        """Return the time on the busiest of the expert-parallel ranks."""
        assert self._moe is not None
        ep = self._layout.ep
        rows = busiest_rank_rows(self._moe, ep, tokens)
        local = self._moe.experts / ep
        # One product per expert: `parameters` already holds all of the rank's experts.
        moved = product.weight_bytes * busiest_rank_experts(self._moe, ep, tokens) / local
        moved += product.activation_bytes(rows)
        flops = 2 * rows / local * product.parameters
        return product.count * self._roofline(moved, flops, product.tensor.format)

    def _roofline(self, moved_bytes: float, flops: float, weight_format: str) -> float:
        precision = compute_format(weight_format, self._gpu.dense_flops_per_s)
        return max(
            moved_bytes / self._gpu.memory_bandwidth_bytes_per_s,
            flops / self._gpu.dense_flops_per_s[precision],
        )

    def _decode_terms(self, query_tokens: int) -> DecodeTerms:
        """Return the attention's terms with what decode context parallelism sends per request."""
        terms = self._attention.decode_terms(query_tokens)
        sent_s = query_tokens * self._collectives.decode_token_s
        return DecodeTerms(terms.context_token_s, terms.limited, terms.request_s + sent_s)


def _growth(step: Step) -> float:
    """Return the tokens that all contexts of a step grow by from one step to the next."""
    growth = step.decode_context_growth
    return float(step.decode_requests) if growth is None else growth


def _reads(step: Step, limit: int, ramp: FloatArray) -> FloatArray | float:
    contexts = step.decode_context_tokens
    return limited_reads(contexts, limit, _growth(step) / len(contexts), ramp)
