"""Steps from measured kernels: a pass is the sum of the operators that an engine launches.

What a profile measured is taken from it; what it lacks comes from the nearest source and says so.
Small kernels (norms, rope, KV writes, activations), sampling and the engine's own time per step are
no tables: their constants are estimates of an SGLang 0.5.14 trace study, with a wide interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tonnage.sim.cost.attention import limited_reads
from tonnage.sim.cost.collectives import context_parallel_token_s, pipeline_row_s
from tonnage.sim.cost.fused import FusedProduct, fused_products
from tonnage.sim.cost.measured_attention import layer_attentions
from tonnage.sim.cost.operator_models import OperatorModels
from tonnage.sim.cost.operator_times import OperatorTime, total_s
from tonnage.sim.cost.step_time import Decoding, Rows, StepExecutor
from tonnage.sim.domain import (
    DenseMlp,
    FloatArray,
    GpuSpec,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    PromptChunk,
    Role,
    Step,
)
from tonnage.sim.model.layout import mlp_ways

_ACTIVATION_BYTES = 2  # BF16
_LATENT_PRODUCT = "kv_b_proj"


@dataclass(frozen=True, slots=True)
class StepAssumptions:
    """What no kernel table knows.

    - `routing`: how tokens choose experts: uniform, balanced, power_law_1.01, power_law_1.2.
    - `shared_expert_beside`: in a captured pass the shared expert runs on a second stream beside
      the routed ones (SGLang's dual stream).
    - `small_kernel_s`: one norm, rope, KV write or activation in a captured pass; with many rows
      it moves its rows four times at `small_kernel_efficiency` of the memory bandwidth.
    - `sampling_s`, `sampling_row_s`: after the head, once and per sampled row.
    - `step_overhead_s`: the engine's own time in every step.
    """

    routing: str = "uniform"
    shared_expert_beside: bool = True
    small_kernel_s: float = 2.5e-6
    small_kernel_efficiency: float = 0.6
    norm_kernels: int = 2  # per layer
    dense_mlp_kernels: int = 1
    moe_kernels: int = 2
    sampling_s: float = 65e-6
    sampling_row_s: float = 0.9e-6
    step_overhead_s: float = 0.0


class MeasuredExecutor(StepExecutor):
    """Predict steps from the operator models of a profile."""

    def __init__(
        self,
        model: ModelSpec,
        layout: ParallelLayout,
        gpu: GpuSpec,
        kv_format: str,
        engine: str,
        models: OperatorModels,
        captured_sizes: tuple[int, ...] = (),
        assumptions: StepAssumptions | None = None,
    ) -> None:
        """Compose the operators of one pool; nothing is looked up yet."""
        super().__init__(layout, captured_sizes)
        self._assumptions = assumptions or StepAssumptions()
        self._models = models
        self._gpu = gpu
        self._hidden_size = model.hidden_size
        self._attentions = layer_attentions(model, layout, gpu, kv_format, models)
        in_module = any(one.covers_projections for one in self._attentions)
        skipped = (Role.ATTENTION, Role.INDEXER) if in_module else ()
        self._products = [
            (product, count)
            for product, count in fused_products(model, layout, engine)
            if product.role not in skipped
        ]
        self._latent_heads = max(1, _latent_heads(model) // layout.attention_tp)
        self._moe = _moe_layers(model)
        self._reduces = _reduces(model, layout, engine)
        self._small_kernels = self._small_kernels_per_pass(model)
        self._pipeline_row_s = pipeline_row_s(model, layout, gpu)
        self._context_token_s = context_parallel_token_s(model, layout, gpu)
        self._products_s = lru_cache(maxsize=65536)(self._product_times_s)

    # --- what a step asks -----------------------------------------------------------------------

    def products_s(self, rows: Rows) -> float:
        """Return the time of all that depends on rows alone."""
        return self._products_s(rows)

    def _product_times_s(self, rows: Rows) -> float:
        return total_s(self.product_times(rows))

    def prefill_s(self, chunks: Sequence[PromptChunk]) -> float:
        """Return the time of the attention of prompt chunks on one rank."""
        return total_s(self.prefill_times(chunks)) if chunks else 0.0

    def decode_s(self, decoding: Decoding, ramp: FloatArray) -> FloatArray:
        """Return the time of one rank's attention in the steps of `ramp`."""
        seconds: FloatArray = np.zeros(len(ramp))
        growth = decoding.growth / decoding.requests
        means = decoding.context_sum / decoding.requests + growth * ramp
        batch = max(1, round(decoding.requests))
        for attention in self._attentions:
            contexts = means
            if attention.window_tokens is not None:
                reads = limited_reads(decoding.contexts, attention.window_tokens, growth, ramp)
                contexts = np.broadcast_to(reads, ramp.shape) / len(decoding.contexts)
            seconds += attention.decode_s(batch, contexts, decoding.query_tokens)
        return seconds

    # --- operator by operator -------------------------------------------------------------------

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step that is spread evenly over the attention-DP ranks."""
        ranks = self.layout.attention_dp
        found = list(self.product_times(self.rows_of(step)))
        for one in self.prefill_times(step.prefill_chunks):
            found.append(one.scaled(1 / ranks))
        requests = step.decode_requests
        if requests:
            batch = max(1, round(requests / ranks))
            mean = step.decode_context_sum / requests
            for attention in self._attentions:
                context = (
                    mean if attention.window_tokens is None else min(mean, attention.window_tokens)
                )
                found.append(attention.decode_time(batch, context, step.query_tokens))
        return found

    def product_times(self, rows: Rows) -> Iterator[OperatorTime]:
        """Yield what depends on rows alone: products, experts, collectives, small kernels."""
        routed = list(self._routed_times(rows))
        for product, count in self._products:
            time = self._product_time(product, count, rows)
            beside = self._assumptions.shared_expert_beside and rows.in_graph
            if product.role is Role.SHARED_EXPERT and beside:
                time = time.beside(total_s(routed))
            yield time
        yield from routed
        yield from self._collective_times(rows)
        yield from self._small_times(rows)

    def prefill_times(self, chunks: Sequence[PromptChunk]) -> Iterator[OperatorTime]:
        """Yield the attention of prompt chunks on one rank, by kind of layer."""
        for attention in self._attentions if chunks else ():
            yield attention.prefill_time(chunks)
        past_tokens = sum(chunk.past_tokens for chunk in chunks)
        for product, count in self._products:
            if product.name == _LATENT_PRODUCT and past_tokens:  # the prefix is multiplied out too
                estimate = self._models.gemm.seconds(
                    product.format, past_tokens, product.out_features, product.in_features
                )
                yield OperatorTime.of("attention.kv_b_proj_of_prefix", estimate, count)

    def _product_time(self, product: FusedProduct, count: int, rows: Rows) -> OperatorTime:
        if product.name == _LATENT_PRODUCT and rows.in_graph:  # absorbed into batched products
            estimate = self._models.mla_bmm.seconds(self._latent_heads, rows.rank, product.format)
            return OperatorTime.of("attention.absorbed_kv_b", estimate, count)
        if product.role in (Role.HEAD, Role.EMBEDDING):
            number = rows.gathered_outputs if product.gathered else rows.rank_outputs
        else:
            number = rows.gathered if product.gathered else rows.rank
        estimate = self._models.gemm.seconds(
            product.format, max(number, 1.0), product.out_features, product.in_features
        )
        name = f"{product.role.value}.{product.name}"
        return OperatorTime.of(name, estimate, count)

    def _routed_times(self, rows: Rows) -> Iterator[OperatorTime]:
        for mlp, weight_format, count in self._moe:
            estimate = self._models.moe.seconds(
                weight_format,
                max(rows.tokens, 1),
                self._hidden_size,
                mlp.intermediate_size,
                mlp.experts,
                mlp.top_k,
                self.layout.tp // self.layout.ep,
                self.layout.ep,
                self._assumptions.routing,
            )
            yield OperatorTime.of("routed_experts", estimate, count)

    def _collective_times(self, rows: Rows) -> Iterator[OperatorTime]:
        for ways, gathered, count in self._reduces:
            number = rows.gathered if gathered else rows.rank
            message_bytes = max(number, 1.0) * self._hidden_size * _ACTIVATION_BYTES
            estimate = self._models.comm.all_reduce(ways, message_bytes, in_graph=rows.in_graph)
            yield OperatorTime.of("all_reduce", estimate, count)
        sent_s = self._pipeline_row_s * rows.rank
        if rows.in_graph:  # what prefill gathers for context parallelism is not modelled
            sent_s += self._context_token_s * rows.rank
        if sent_s:
            yield OperatorTime.assumed("pipeline_and_context_links", sent_s)

    def _small_times(self, rows: Rows) -> Iterator[OperatorTime]:
        facts = self._assumptions
        row_bytes = 4.0 * self._hidden_size * _ACTIVATION_BYTES
        moved_s = rows.rank * row_bytes / self._gpu.memory_bandwidth_bytes_per_s
        each_s = max(facts.small_kernel_s, moved_s / facts.small_kernel_efficiency)
        yield OperatorTime.assumed("small_kernels", self._small_kernels * each_s, spread=1.6)
        sampled_s = facts.sampling_s + facts.sampling_row_s * rows.rank_outputs
        yield OperatorTime.assumed("sampling", sampled_s)
        if facts.step_overhead_s:
            yield OperatorTime.assumed("engine_overhead", facts.step_overhead_s, spread=1.0)

    def _small_kernels_per_pass(self, model: ModelSpec) -> int:
        facts = self._assumptions
        total: int = sum(one.layers * one.small_kernels for one in self._attentions)
        for layer in model.layers:
            total += facts.norm_kernels
            if isinstance(layer.mlp, MoeMlp):
                total += facts.moe_kernels
            elif isinstance(layer.mlp, DenseMlp):
                total += facts.dense_mlp_kernels
        return total


def _latent_heads(model: ModelSpec) -> int:
    latents = (layer.attention for layer in model.layers)
    return next((one.heads for one in latents if isinstance(one, MlaAttention)), 0)


def _moe_layers(model: ModelSpec) -> list[tuple[MoeMlp, str, int]]:
    """Return (experts, format of their weights, layers) of each kind of expert layer."""
    counts: dict[tuple[MoeMlp, str], int] = {}
    for layer in model.layers:
        if isinstance(layer.mlp, MoeMlp):
            formats = [one.format for one in layer.weights if one.role is Role.ROUTED_EXPERT]
            key = (layer.mlp, formats[0])
            counts[key] = counts.get(key, 0) + 1
    return [(mlp, weight_format, count) for (mlp, weight_format), count in counts.items()]


def _reduces(model: ModelSpec, layout: ParallelLayout, engine: str) -> list[tuple[int, bool, int]]:
    """Return (ranks, over the rows of all attention-DP ranks, times) of the all-reduces of a pass.

    Where an MLP is split over more ranks than attention is, an all-gather and a reduce-scatter
    take the place of one all-reduce and move as much.
    """
    counts: dict[tuple[int, bool], int] = {}
    for layer in model.layers:
        ways = [layout.attention_tp] if layer.attention is not None else []
        if isinstance(layer.mlp, DenseMlp):
            ways.append(mlp_ways(layout, engine))
        elif isinstance(layer.mlp, MoeMlp):
            ways.append(layout.tp)
        for one in ways:
            if one > 1:
                key = (one, one > layout.attention_tp)
                counts[key] = counts.get(key, 0) + 1
    return [(ways, gathered, count) for (ways, gathered), count in counts.items()]
