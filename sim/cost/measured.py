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
from tonnage.sim.cost.engine_terms import KERNELS_ALONE, EngineTerms
from tonnage.sim.cost.estimate import OperatorCurve
from tonnage.sim.cost.fused import FusedProduct, fused_products
from tonnage.sim.cost.measured_attention import layer_attentions
from tonnage.sim.cost.operator_models import OperatorModels
from tonnage.sim.cost.operator_times import OperatorTime, total_s
from tonnage.sim.cost.row_terms import RowTerm, RowTerms
from tonnage.sim.cost.small_ops import SmallOpTerms
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
_TOKENS, _RANK, _GATHERED, _RANK_OUTPUTS, _GATHERED_OUTPUTS = range(5)  # places in `Rows`


@dataclass(frozen=True, slots=True)
class StepAssumptions:
    """What no kernel table knows.

    - `routing`: how tokens choose experts: uniform, balanced, power_law_1.01, power_law_1.2.
    - `shared_expert_beside`: in a captured pass the shared expert runs on a second stream beside
      the routed ones (SGLang's dual stream).
    - `small_kernel_s`: one norm, rope, KV write or activation in a captured pass; with many rows
      it moves its rows four times at `small_kernel_efficiency` of the memory bandwidth.
    - `sampling_s`, `sampling_row_s`: after the head, once and per sampled row.
    - `step_overhead_s`: the engine's own time in every step, on top of its terms.
    - `terms`: what the engine makes of its kernels, fitted on serving runs; or nothing.
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
    terms: EngineTerms = KERNELS_ALONE


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
        terms = self._assumptions.terms
        self._attentions = layer_attentions(model, layout, gpu, kv_format, models, terms)
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
        self.launches = self._small_kernels + self._large_kernels_per_pass()
        small = models.small
        self._small = (
            None
            if small is None
            else SmallOpTerms.of(small, model, layout, kv_format, in_module=in_module)
        )
        self._pipeline_row_s = pipeline_row_s(model, layout, gpu)
        self._context_token_s = context_parallel_token_s(model, layout, gpu)
        self._terms = lru_cache(maxsize=2)(self._row_terms)  # of passes that are seen
        self._prefix_curves = self._curves_of_prefix()
        self._products_s = lru_cache(maxsize=65536)(self._row_times_s)

    # --- what a step asks -----------------------------------------------------------------------

    def products_s(self, rows: Rows) -> float:
        """Return the time of all that depends on rows alone."""
        return self._products_s(rows)

    def _row_times_s(self, rows: Rows) -> float:
        """Return the sum of `product_times`, for what is asked at every step."""
        seconds = self._terms(rows.in_graph).seconds(rows) + total_s(self._small_times(rows))
        return seconds if rows.in_graph else max(seconds, self.launching_s)

    @property
    def launching_s(self) -> float:
        """The time that the host needs to launch a pass that is not captured."""
        return self.launches * self._assumptions.terms.launch_s

    def prefill_s(self, chunks: Sequence[PromptChunk]) -> float:
        """Return the time of the attention of prompt chunks on one rank."""
        if not chunks:
            return 0.0
        seconds = sum(attention.prefill_s(chunks) for attention in self._attentions)
        past_tokens = sum(chunk.past_tokens for chunk in chunks)
        if past_tokens:
            seconds += sum(count * curve.at(past_tokens) for curve, count in self._prefix_curves)
        return seconds

    def decode_s(self, decoding: Decoding, ramp: FloatArray) -> FloatArray:
        """Return the time of one rank's attention in the steps of `ramp`."""
        if not self._attentions:
            return np.zeros(len(ramp))
        growth = decoding.growth / decoding.requests
        means = growth * ramp
        means += decoding.context_sum / decoding.requests
        batch = max(1, round(decoding.requests))
        seconds: FloatArray | float = 0.0
        for attention in self._attentions:
            contexts = means
            if attention.window_tokens is not None:
                reads = limited_reads(decoding.contexts, attention.window_tokens, growth, ramp)
                contexts = np.broadcast_to(reads, ramp.shape) / len(decoding.contexts)
            seconds = seconds + attention.decode_s(batch, contexts, decoding.query_tokens)
        return np.asarray(seconds)

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
        found = [*self._terms(rows.in_graph).times(rows), *self._small_times(rows)]
        waiting_s = self.launching_s - total_s(found)
        yield from found
        if waiting_s > 0 and not rows.in_graph:
            yield OperatorTime.assumed("launching", waiting_s, spread=1.5)

    def prefill_times(self, chunks: Sequence[PromptChunk]) -> Iterator[OperatorTime]:
        """Yield the attention of prompt chunks on one rank, by kind of layer."""
        for attention in self._attentions if chunks else ():
            yield attention.prefill_time(chunks)
        past_tokens = sum(chunk.past_tokens for chunk in chunks)
        for curve, count in self._prefix_curves if past_tokens else ():
            estimate = curve.estimate(past_tokens)
            yield OperatorTime.of("attention.kv_b_proj_of_prefix", estimate, count)

    def _curves_of_prefix(self) -> list[tuple[OperatorCurve, int]]:
        """Return the product that a cached prefix goes through again, and how often."""
        return [
            (self._models.gemm.curve(one.format, one.out_features, one.in_features), count)
            for one, count in self._products
            if one.name == _LATENT_PRODUCT
        ]

    # --- what depends on rows alone -------------------------------------------------------------

    def _row_terms(self, in_graph: bool) -> RowTerms:
        """Return the operators of a pass that is a captured one, or is not."""
        beside: list[RowTerm] = []
        others: list[RowTerm] = []
        for product, count in self._products:
            term = self._product_term(product, count, in_graph)
            is_beside = self._assumptions.shared_expert_beside and in_graph
            is_beside = is_beside and product.role is Role.SHARED_EXPERT
            (beside if is_beside else others).append(term)
        others += self._collective_terms(in_graph)
        return RowTerms(tuple(self._routed_terms()), tuple(beside), tuple(others))

    def _product_term(self, product: FusedProduct, count: int, in_graph: bool) -> RowTerm:
        if product.name == _LATENT_PRODUCT and in_graph:  # absorbed into batched products
            absorbed = self._models.mla_bmm.curve(self._latent_heads, product.format)
            family = f"absorbed.{product.format}"
            return self._term("attention.absorbed_kv_b", absorbed, count, _RANK, family)
        if product.role in (Role.HEAD, Role.EMBEDDING):
            rows = _GATHERED_OUTPUTS if product.gathered else _RANK_OUTPUTS
        else:
            rows = _GATHERED if product.gathered else _RANK
        curve = self._models.gemm.curve(product.format, product.out_features, product.in_features)
        name, family = f"{product.role.value}.{product.name}", f"product.{product.format}"
        return self._term(name, curve, count, rows, family)

    def _routed_terms(self) -> Iterator[RowTerm]:
        ep = self.layout.ep
        for mlp, weight_format, count in self._moe:
            width, experts, top_k = mlp.intermediate_size, mlp.experts, mlp.top_k
            sizes = (self._hidden_size, width, experts, top_k, self.layout.tp // ep, ep)
            curve = self._models.moe.curve(weight_format, sizes, self._assumptions.routing)
            family = f"experts.{weight_format}"
            yield self._term("routed_experts", curve, count, _TOKENS, family)

    def _collective_terms(self, in_graph: bool) -> Iterator[RowTerm]:
        row_bytes = float(self._hidden_size * _ACTIVATION_BYTES)
        for ways, gathered, count in self._reduces:
            curve = self._models.comm.all_reduce_curve(ways, in_graph=in_graph)
            rows = _GATHERED if gathered else _RANK
            yield self._term("all_reduce", curve, count, rows, "all_reduce", row_bytes)

    def _term(
        self,
        name: str,
        curve: OperatorCurve,
        count: int,
        rows: int,
        family: str,
        per_row: float = 1.0,
    ) -> RowTerm:
        factor = self._assumptions.terms.factor(family)
        return RowTerm(name, curve, count, rows, per_row, family, factor)

    def _small_times(self, rows: Rows) -> Iterator[OperatorTime]:
        facts = self._assumptions
        sent_s = self._pipeline_row_s * rows.rank
        if rows.in_graph:  # what prefill gathers for context parallelism is not modelled
            sent_s += self._context_token_s * rows.rank
        if sent_s:
            yield OperatorTime.assumed("pipeline_and_context_links", sent_s)
        terms = facts.terms
        host_s = terms.step_s + terms.sequence_s * rows.rank_outputs
        if facts.step_overhead_s or host_s:
            yield OperatorTime.assumed(
                "engine_overhead", facts.step_overhead_s + host_s, spread=1.0
            )
        if self._small is not None:
            seconds = self._small.seconds(rows.rank, rows.rank_outputs, rows.in_graph)
            # Spread: how far apart the samples of a row may lie before it is measured again.
            yield OperatorTime.assumed("small_operators", seconds, "measured", spread=1.25)
            return
        row_bytes = 4.0 * self._hidden_size * _ACTIVATION_BYTES
        moved_s = rows.rank * row_bytes / self._gpu.memory_bandwidth_bytes_per_s
        each_s = max(facts.small_kernel_s, moved_s / facts.small_kernel_efficiency)
        small_s = self._small_kernels * each_s * terms.factor("small_kernels")
        yield OperatorTime.assumed("small_kernels", small_s, spread=1.6, family="small_kernels")
        sampled_s = facts.sampling_s + facts.sampling_row_s * rows.rank_outputs
        sampled_s *= terms.factor("sampling")
        yield OperatorTime.assumed("sampling", sampled_s, family="sampling")

    def _large_kernels_per_pass(self) -> int:
        """Return the products, experts, collectives and attentions that a pass launches."""
        products = sum(count for _, count in self._products)
        experts = sum(count for *_, count in self._moe)
        reduces = sum(count for *_, count in self._reduces)
        return products + experts + reduces + sum(one.layers for one in self._attentions)

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
