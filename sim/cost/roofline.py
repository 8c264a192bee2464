"""Times of operators from the GPU's datasheet: a roofline each, provenance `datasheet`.

Each operator takes the larger of its bytes over the memory bandwidth and its FLOP over the dense
peak of its precision; collectives take their bytes over the link. There are no launch, latency or
engine overheads, and no efficiency below the peak: the result is a lower bound on the time.
Attention computes in BF16 whatever the KV format, and experts spread over ranks are charged an
all-reduce like any other block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from tonnage.sim.cost.attention import AttentionTimes, DecodeTerms, limited_reads
from tonnage.sim.cost.collectives import collective_times
from tonnage.sim.cost.experts import busiest_rank_experts, busiest_rank_rows
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.operators import MatrixProduct, matrix_products
from tonnage.sim.cost.step_time import Decoding, Rows, StepExecutor
from tonnage.sim.domain import (
    FloatArray,
    GpuSpec,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    PromptChunk,
    Role,
    Step,
)
from tonnage.sim.model.formats import compute_format

_FIRST = np.zeros(1)  # of a segment's steps


class RooflineExecutor(StepExecutor):
    """Predict steps from the datasheet."""

    def __init__(
        self,
        model: ModelSpec,
        layout: ParallelLayout,
        gpu: GpuSpec,
        kv_format: str,
        engine: str = "sglang",
        captured_sizes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(layout, captured_sizes)
        self._gpu = gpu
        self._products = list(matrix_products(model, layout, engine))
        self._moe = next((la.mlp for la in model.layers if isinstance(la.mlp, MoeMlp)), None)
        self._collectives = collective_times(model, layout, gpu, engine)
        self._attention = AttentionTimes(model, layout, gpu, kv_format)
        self._terms = lru_cache(maxsize=64)(self._decode_terms)
        self.products_s = lru_cache(maxsize=65536)(self.products_s)  # type: ignore[method-assign]

    def products_s(self, rows: Rows) -> float:
        """Return the time of all matrix products and collectives."""
        total_s = sum(seconds for _, seconds in self._products_times(rows))
        total_s += self._collectives.rank_row_s * rows.rank
        return total_s + self._collectives.gathered_row_s * rows.gathered

    def _products_times(self, rows: Rows) -> Iterator[tuple[MatrixProduct, float]]:
        for product in self._products:
            role = product.tensor.role
            if role is Role.ROUTED_EXPERT:
                yield product, self._expert_seconds(product, rows.tokens)
                continue
            is_gathered = product.ways > self.layout.attention_tp
            if role in (Role.HEAD, Role.EMBEDDING):
                count = rows.gathered_outputs if is_gathered else rows.rank_outputs
            else:
                count = rows.gathered if is_gathered else rows.rank
            yield product, product.count * self._product_seconds(product, count)

    def prefill_s(self, chunks: Sequence[PromptChunk]) -> float:
        """Return the time of the attention of prompt chunks on one rank."""
        return self._attention.prefill_s(chunks)

    def decode_s(self, decoding: Decoding, ramp: FloatArray) -> FloatArray:
        """Return the time of one rank's attention in the steps of `ramp`."""
        terms = self._terms(decoding.query_tokens)
        start_s = terms.context_token_s * decoding.context_sum
        start_s += terms.request_s * decoding.requests
        seconds: FloatArray = start_s + terms.context_token_s * decoding.growth * ramp
        for s_per_token, limit in terms.limited:
            growth = decoding.growth / decoding.requests
            reads = limited_reads(decoding.contexts, limit, growth, ramp)
            seconds += s_per_token * decoding.share * reads
        return seconds

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step that is spread evenly over the attention-DP ranks."""
        rows, ranks = self.rows_of(step), self.layout.attention_dp
        found = [
            _known(f"{product.tensor.role.value}.{product.tensor.name.rpartition('.')[2]}", seconds)
            for product, seconds in self._products_times(rows)
        ]
        links = self._collectives.rank_row_s * rows.rank
        links += self._collectives.gathered_row_s * rows.gathered
        found.append(_known("collectives", links))
        if step.prefill_chunks:
            found.append(_known("prefill_attention", self.prefill_s(step.prefill_chunks) / ranks))
        if step.decode_requests:
            decoding = self.decoding_of(step)
            found.append(_known("decode_attention", float(self.decode_s(decoding, _FIRST)[0])))
        return found

    def _product_seconds(self, product: MatrixProduct, tokens: float) -> float:
        moved = product.weight_bytes + product.activation_bytes(tokens)
        return self._roofline(moved, 2 * tokens * product.parameters, product.tensor.format)

    def _expert_seconds(self, product: MatrixProduct, tokens: int) -> float:
        """Return the time on the busiest of the expert-parallel ranks."""
        assert self._moe is not None
        ep = self.layout.ep
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


def _known(name: str, seconds: float) -> OperatorTime:
    """Return a time that is its own roofline: a lower bound, with no interval around it."""
    return OperatorTime(name, seconds, seconds, seconds, seconds, "datasheet")
