"""What an engine lets weights and KV take of one GPU, and what the rest is for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from tonnage.sim.domain import (
    DenseMlp,
    EngineSpec,
    GpuSpec,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    PoolSpec,
    Role,
)
from tonnage.sim.model.engine_rules import (
    MIB,
    EngineRules,
    SglangRules,
    TrtllmRules,
    VllmRules,
    captured_prefill_sizes,
    default_graph_batch,
    rules_for,
)
from tonnage.sim.model.layout import mlp_ways

# CUDA sees less than nvidia-smi reports: 482 MiB less on H100 (79.18 GiB), 483 on RTX 4090
# (25,250,627,584 B), 604 on H200 (139.8 GiB), 717 on B200 (182,642 MiB); about 870 on A100.
_HIDDEN_LEAST_BYTES = 483 * MIB
_HIDDEN_BASE_BYTES, _HIDDEN_SHARE = 294 * MIB, 0.0023
# Before SGLang loads weights: a CUDA context and, with several ranks, communicators. H200 with
# tp 8 or 16 logs 137.3 to 138.1 GiB then, of 139.8 (sgl-project/sglang pull request 11716).
_CONTEXT_BYTES, _COMMUNICATORS_BYTES = 512 * MIB, 1536 * MIB
# vLLM's "non-torch" memory by tp: 0.13 GiB (llm-d-planner, gpt-oss on one GPU), 0.55 (two), 2.13
# (four).
_NON_TORCH_MIB = ((4, 2181.0), (2, 563.0), (1, 133.0))
_ACTIVATION_BYTES, _LOGIT_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class Budget:
    """How one GPU's memory is divided before anything is loaded.

    `static_bytes` is for weights and KV together. `activation_bytes`, `graph_bytes` and
    `other_bytes` are the rest. `fraction_most` is the largest fraction the engine's own estimate of
    activations and graphs allows; `base_bytes` is what the fraction multiplies. `kv_share`: of what
    the weights leave of `static_bytes`, what becomes KV.
    """

    static_bytes: float
    activation_bytes: float
    graph_bytes: float
    other_bytes: float
    base_bytes: float
    mem_fraction: float
    mem_fraction_source: str
    fraction_most: float
    assumptions: tuple[str, ...]
    kv_share: float = 1.0


def cuda_visible_bytes(gpu: GpuSpec) -> float:
    """Return the memory that CUDA offers to a process, of what the driver reports."""
    hidden_bytes = _HIDDEN_BASE_BYTES + _HIDDEN_SHARE * gpu.memory_bytes
    return gpu.memory_bytes - max(_HIDDEN_LEAST_BYTES, hidden_bytes)


def gpu_budget(model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec) -> Budget:
    """Return what the engine of this version leaves for weights and KV on each GPU of the pool."""
    chosen = rules_for(engine)
    if isinstance(chosen.rules, SglangRules):
        budget = _sglang_budget(chosen.rules, model, gpu, engine, pool)
    elif isinstance(chosen.rules, TrtllmRules):
        budget = _trtllm_budget(chosen.rules, model, gpu, engine, pool)
    else:
        budget = _vllm_budget(chosen.rules, model, gpu, engine, pool)
    remarks: tuple[str, ...] = (chosen.remark,) if chosen.remark else ()
    left_bytes = budget.base_bytes - budget.static_bytes
    left_bytes -= budget.activation_bytes + budget.graph_bytes
    if left_bytes < 0:
        missing = f"{-left_bytes / 2**30:.1f} GiB less than activations and graphs take"
        remarks += (f"mem_fraction {budget.mem_fraction:g} leaves {missing}",)
    return replace(budget, assumptions=remarks + budget.assumptions)


def default_fraction(rules: EngineRules, model: ModelSpec, gpu: GpuSpec, pool: PoolSpec) -> float:
    """Return the memory fraction that the engine takes when none is given."""
    if isinstance(rules, VllmRules):
        return rules.memory_fraction
    if isinstance(rules, TrtllmRules):
        return rules.free_fraction
    memory_mib = gpu.memory_bytes / MIB
    reserve_mib = _sglang_activation_mib(rules, gpu, pool) + _sglang_graph_mib(
        rules, model, gpu, pool
    )
    reserve_mib += rules.reserve_base_mib
    reserve_mib += pool.layout.gpus / 8 * rules.reserve_mib_per_8_gpus
    if memory_mib > rules.reserve_least_above_mib:
        reserve_mib = max(reserve_mib, rules.reserve_least_mib)
    fraction = round((memory_mib - reserve_mib) / memory_mib, 3)
    return fraction * rules.vision_factor if _runs_vision(model, pool) else fraction


def _sglang_budget(
    rules: SglangRules, model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec
) -> Budget:
    automatic = default_fraction(rules, model, gpu, pool)
    fraction = automatic if engine.mem_fraction is None else engine.mem_fraction
    is_alone = pool.layout.gpus == 1
    base_bytes = cuda_visible_bytes(gpu) - _CONTEXT_BYTES
    base_bytes -= 0.0 if is_alone else _COMMUNICATORS_BYTES
    vision_bytes = rules.vision_cache_mib * MIB if _has_vision(model) else 0.0
    static_bytes = fraction * base_bytes - vision_bytes
    activation_bytes = _sglang_activation_mib(rules, gpu, pool) * MIB
    graph_bytes = _sglang_graph_mib(rules, model, gpu, pool) * MIB
    other_bytes = gpu.memory_bytes - static_bytes - activation_bytes - graph_bytes
    assumed = f"{base_bytes / 2**30:.1f} GiB of each {gpu.name} free before weights are loaded"
    return Budget(
        static_bytes,
        activation_bytes,
        graph_bytes,
        other_bytes,
        base_bytes,
        fraction,
        engine.mem_fraction_source,
        automatic,
        (assumed,),
    )


def _sglang_activation_mib(rules: SglangRules, gpu: GpuSpec, pool: PoolSpec) -> float:
    # A decode pool works on the requests of a step, the others on a prefill chunk.
    is_decode = pool.role == "decode"
    tokens = _sglang_graph_batch(rules, gpu, pool) if is_decode else pool.chunk_tokens
    if is_decode and pool.speculation is not None and pool.speculation.draft_tokens:
        # A speculating server that is not told otherwise runs few requests, fewer than it captures.
        tokens = pool.max_running_requests * pool.speculation.query_tokens
    return rules.activation_mib_per_token * max(tokens, rules.activation_tokens_least)


def _sglang_graph_batch(rules: SglangRules, gpu: GpuSpec, pool: PoolSpec) -> int:
    return min(default_graph_batch(rules, gpu, pool.layout.tp), pool.max_running_requests)


def _sglang_graph_mib(rules: SglangRules, model: ModelSpec, gpu: GpuSpec, pool: PoolSpec) -> float:
    total_mib = 0.0
    if pool.role != "prefill":
        batch = _sglang_graph_batch(rules, gpu, pool)
        total_mib += batch * rules.graph_mib_per_sequence
        if pool.layout.attention_dp > 1:
            per_sequence_mib = rules.graph_dp_mib_per_sequence
            if batch > rules.graph_dp_large_batch:
                per_sequence_mib += rules.graph_dp_large_mib_per_sequence
            total_mib += batch * pool.layout.attention_dp * per_sequence_mib
    if pool.role != "decode":
        if any(isinstance(layer.attention, MlaAttention) for layer in model.layers):
            total_mib += rules.prefill_graph_mla_mib
        else:
            sizes = captured_prefill_sizes(pool.chunk_tokens)
            total_mib += len(sizes) * rules.prefill_graph_mib_per_size
    return total_mib


def _vllm_budget(
    rules: VllmRules, model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec
) -> Budget:
    fraction = rules.memory_fraction if engine.mem_fraction is None else engine.mem_fraction
    base_bytes = cuda_visible_bytes(gpu)
    activation_bytes = vllm_activation_bytes(rules, model, pool)
    graph_bytes = rules.graph_mib_per_layer * MIB * len(model.layers) / pool.layout.pp
    non_torch_bytes = _non_torch_bytes(pool)
    static_bytes = fraction * base_bytes - activation_bytes - non_torch_bytes
    if rules.counts_graphs:
        static_bytes -= graph_bytes
    other_bytes = gpu.memory_bytes - static_bytes - activation_bytes - graph_bytes
    return Budget(
        static_bytes,
        activation_bytes,
        graph_bytes,
        other_bytes,
        base_bytes,
        fraction,
        engine.mem_fraction_source,
        rules.memory_fraction_most,
        (),
    )


def _trtllm_budget(
    rules: TrtllmRules, model: ModelSpec, gpu: GpuSpec, engine: EngineSpec, pool: PoolSpec
) -> Budget:
    """Return what is left for weights and KV; the free fraction is of the KV alone.

    The peak of its profiling pass is a layer's rows, as in vLLM; it samples the requests of a pass
    only, so that no sampler's arrays are among it. Graphs are captured after the pool is sized.
    """
    fraction = rules.free_fraction if engine.mem_fraction is None else engine.mem_fraction
    base_bytes = cuda_visible_bytes(gpu)
    activation_bytes = pool.chunk_tokens * _layer_row_bytes(model, pool, "trtllm")
    graph_bytes = rules.graph_mib_per_layer * MIB * len(model.layers) / pool.layout.pp
    static_bytes = base_bytes - activation_bytes - _non_torch_bytes(pool)
    return Budget(
        static_bytes,
        activation_bytes,
        graph_bytes,
        gpu.memory_bytes - static_bytes - activation_bytes - graph_bytes,
        base_bytes,
        fraction,
        engine.mem_fraction_source,
        1.0,
        (f"KV: {fraction:g} of what is free with weights loaded and a pass computed",),
        fraction,
    )


def _non_torch_bytes(pool: PoolSpec) -> float:
    return next(mib for tp, mib in _NON_TORCH_MIB if pool.layout.tp >= tp) * MIB


def vllm_activation_bytes(rules: VllmRules, model: ModelSpec, pool: PoolSpec) -> float:
    """Return the activation peak of vLLM's profiling run: its sampler's or a layer's.

    The sampler's arrays are FP32 `[max running requests of a rank, vocabulary]`.
    """
    sampler_bytes = rules.sampler_copies * _LOGIT_BYTES * model.vocab_size
    sampler_bytes *= ceil(pool.max_running_requests / pool.layout.attention_dp)
    return max(sampler_bytes, pool.chunk_tokens * _layer_row_bytes(model, pool, "vllm"))


def _layer_row_bytes(model: ModelSpec, pool: PoolSpec, engine: str) -> float:
    """Return what one token takes in a layer: hidden states, the widest MLP's gate, up, product."""
    layout, widest = pool.layout, 0.0
    for layer in model.layers:
        if isinstance(layer.mlp, DenseMlp):
            width = 3 * layer.mlp.intermediate_size / mlp_ways(layout, engine)
        elif isinstance(layer.mlp, MoeMlp):
            width = 3 * layer.mlp.top_k * layer.mlp.intermediate_size / layout.tp
            width += layer.mlp.top_k * model.hidden_size / layout.ep
        else:
            continue
        widest = max(widest, width)
    return _ACTIVATION_BYTES * (widest + 6 * model.hidden_size)


def _has_vision(model: ModelSpec) -> bool:
    return any(tensor.role is Role.VISION for tensor in model.outer_weights)


def _runs_vision(model: ModelSpec, pool: PoolSpec) -> bool:
    return pool.role != "decode" and _has_vision(model)
