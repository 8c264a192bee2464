"""What each serving engine does by default, per version, as data.

Sources: SGLang 0.5.23 `srt/arg_groups/memory_hook.py`, `cuda_graph_hook.py` and
`kv_cache_configurator.py`; vLLM 0.33 and its pull request 38284 (both the 0.92 fraction and the
counting of CUDA graphs came with 0.21); vLLM activations: llm-d-planner pull request 205.
TensorRT-LLM 1.x with its PyTorch backend: `llmapi/llm_args.py`, `_torch/pyexecutor/_util.py` and
`py_executor_creator.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.sim.domain import (
    BadInputError,
    EngineSpec,
    GpuSpec,
    GqaAttention,
    MlaAttention,
    ModelSpec,
)
from tonnage.sim.units import version_key

MIB = 2.0**20
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """Defaults of a GPU with less than `below_mib` of memory."""

    below_mib: float
    chunk_tokens: int
    graph_batch_below_tp4: int
    graph_batch: int


@dataclass(frozen=True, slots=True)
class SglangRules:
    """How SGLang sizes its pool: a fraction of the memory that is free before it loads weights.

    The default fraction leaves a reserve: a base, so much per activation token, per 8 GPUs, per
    captured batch size; never less than the floor on a large GPU. All in MiB.
    """

    version: str
    tiers: tuple[MemoryTier, ...]
    reserve_base_mib: float = 512
    activation_mib_per_token: float = 1.5
    activation_tokens_least: int = 2048
    reserve_mib_per_8_gpus: float = 1024
    graph_mib_per_sequence: float = 2
    graph_dp_mib_per_sequence: float = 3
    graph_dp_large_mib_per_sequence: float = 1.5
    graph_dp_large_batch: int = 300
    prefill_graph_mib_per_size: float = 8
    prefill_graph_mla_mib: float = 1536
    reserve_least_mib: float = 10 * 1024
    reserve_least_above_mib: float = 60 * 1024
    vision_factor: float = 0.95  # not in a decode pool; x 0.8 to 1.05 by the tower's size
    vision_cache_mib: float = 100
    max_prefill_tokens: int = 16384
    running_requests_least: int = 2048
    running_requests_most: int = 4096
    speculative_running_requests: int = 48


@dataclass(frozen=True, slots=True)
class VllmRules:
    """How vLLM sizes its pool: a fraction of all memory, less what a profiling run has used.

    `sampler_copies`: how many FP32 `[max running requests, vocabulary]` arrays the profiled
    sampler holds; it is what binds the activation peak of all but small batches.
    """

    version: str
    memory_fraction: float
    counts_graphs: bool
    sampler_copies: float
    graph_mib_per_layer: float = 20
    memory_fraction_most: float = 0.95


@dataclass(frozen=True, slots=True)
class TrtllmRules:
    """How TensorRT-LLM sizes its pool: a fraction of what is free with the weights loaded.

    `KvCacheCreator._cal_max_memory`: total memory less the peak of a profiling pass of
    `max_num_tokens` tokens, times `kv_cache_config.free_gpu_memory_fraction`. `max_batch_size` is
    that of one attention-DP rank. `graph_padding_step`: captured batch sizes go up by it beyond
    128, where `cuda_graph_config.enable_padding` is on, as it is in all published recipes.
    """

    version: str
    free_fraction: float = 0.9
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    graph_padding_step: int = 64
    graph_mib_per_layer: float = 20


EngineRules = SglangRules | VllmRules | TrtllmRules

_SGLANG_TIERS = (
    MemoryTier(20 * 1024, 2048, 8, 8),
    MemoryTier(35 * 1024, 4096, 48, 160),
    MemoryTier(60 * 1024, 4096, 32, 160),
    MemoryTier(160 * 1024, 8192, 256, 512),
    MemoryTier(float("inf"), 16384, 512, 512),
)
# Copies: 5.64 GiB (Qwen3-14B) to 7.38 GiB (gpt-oss) at 1024 requests until 0.16 are 9.6 to 9.9
# arrays; 2.23 GiB (Qwen3-14B) and 2.21 GiB (Qwen2.5-7B) since 0.17 are 3.8.
KNOWN_RULES: dict[str, tuple[EngineRules, ...]] = {
    "sglang": (SglangRules("0.5.23", _SGLANG_TIERS),),
    "vllm": (
        VllmRules("0.11.0", 0.90, counts_graphs=False, sampler_copies=9.7),
        VllmRules("0.16.0", 0.90, counts_graphs=False, sampler_copies=9.7),
        VllmRules("0.17.0", 0.90, counts_graphs=False, sampler_copies=3.83),
        VllmRules("0.19.0", 0.90, counts_graphs=False, sampler_copies=3.83),
        VllmRules("0.21.0", 0.92, counts_graphs=True, sampler_copies=3.83),
        VllmRules("0.33.0", 0.92, counts_graphs=True, sampler_copies=3.83),
    ),
    "trtllm": (TrtllmRules("1.0.0"), TrtllmRules("1.2.0"), TrtllmRules("1.3.0")),
}
# Chunk and running requests of vLLM: (least memory, GiB), its API server's defaults.
_VLLM_HUGE_GIB, _VLLM_LARGE_GIB = 160, 70
_SGLANG_PAGE_TOKENS, _PAGED_KERNEL_TOKENS, _FA4_PAGE_TOKENS, _VLLM_PAGE_TOKENS = 1, 64, 128, 16
_TRTLLM_PAGE_TOKENS = 32  # `tokens_per_block`


@dataclass(frozen=True, slots=True)
class ChosenRules:
    """The rules that stand for an engine version, and a remark when they are another's."""

    rules: EngineRules
    remark: str | None


def rules_for(engine: EngineSpec) -> ChosenRules:
    """Return the rules of the engine's version, else of the nearest older one that is known."""
    if engine.name not in KNOWN_RULES:
        valid = ", ".join(KNOWN_RULES)
        raise BadInputError(f"engine.name: {engine.name!r} is not known; use one of {valid}")
    known = KNOWN_RULES[engine.name]
    asked = version_key(engine.version)
    older = [rules for rules in known if version_key(rules.version) <= asked]
    rules = older[-1] if older else known[0]
    if version_key(rules.version) == asked:
        return ChosenRules(rules, None)
    why = "nearest older version known" if older else "oldest version known"
    return ChosenRules(
        rules, f"{engine.name} {engine.version}: memory rules of {rules.version}, the {why}"
    )


def default_chunk_tokens(engine: EngineSpec, gpu: GpuSpec) -> int:
    """Return the prompt tokens of one prefill step.

    vLLM: `max_num_batched_tokens`; TensorRT-LLM: `max_num_tokens`.
    """
    rules = rules_for(engine).rules
    if isinstance(rules, TrtllmRules):
        return rules.max_num_tokens
    if isinstance(rules, SglangRules):
        return _tier(rules, gpu).chunk_tokens
    if gpu.memory_bytes >= _VLLM_HUGE_GIB * GIB:
        return 16384
    return 8192 if _is_large_for_vllm(gpu) else 2048


def default_max_prefill_tokens(engine: EngineSpec, gpu: GpuSpec) -> int:
    """Return the prompt tokens of all requests of one prefill step."""
    rules = rules_for(engine).rules
    if isinstance(rules, SglangRules):
        return rules.max_prefill_tokens
    return default_chunk_tokens(engine, gpu)


def default_page_tokens(engine: EngineSpec, model: ModelSpec, gpu: GpuSpec, kv_format: str) -> int:
    """Return the tokens of one KV page under the attention kernel that the engine picks.

    `kv_format` does not change it in the versions known. SGLang: 1, but 64 for DSA and for the
    TensorRT-LLM kernels of compute capability 10.x (128 where K and V differ). vLLM: 16, MLA 64.
    TensorRT-LLM: 32, and 64 for FlashMLA, which it takes for MLA on compute capability 9.0.
    """
    del kv_format
    rules = rules_for(engine).rules
    attentions = {layer.attention for layer in model.layers}
    latents = [attention for attention in attentions if isinstance(attention, MlaAttention)]
    if isinstance(rules, TrtllmRules):
        runs_flash_mla = bool(latents) and gpu.compute_capability == "9.0"
        return _PAGED_KERNEL_TOKENS if runs_flash_mla else _TRTLLM_PAGE_TOKENS
    if isinstance(rules, VllmRules):
        return _PAGED_KERNEL_TOKENS if latents else _VLLM_PAGE_TOKENS
    if any(attention.sparse_top_k is not None for attention in latents):
        return _PAGED_KERNEL_TOKENS
    if not gpu.compute_capability.startswith("10."):
        return _SGLANG_PAGE_TOKENS
    grouped = [attention for attention in attentions if isinstance(attention, GqaAttention)]
    asymmetric = any(attention.head_dim != attention.value_dim for attention in grouped)
    return _FA4_PAGE_TOKENS if asymmetric else _PAGED_KERNEL_TOKENS


def default_max_running_requests(
    engine: EngineSpec, gpu: GpuSpec, model: ModelSpec, kv_tokens: int | None = None
) -> int:
    """Return the requests that one attention-DP rank runs at once.

    `kv_tokens` is the pool of that rank; only SGLang's default depends on it.
    """
    rules = rules_for(engine).rules
    if isinstance(rules, TrtllmRules):
        return rules.max_batch_size
    if isinstance(rules, VllmRules):
        return 1024 if _is_large_for_vllm(gpu) else 256
    if kv_tokens is None:
        return rules.running_requests_least
    estimate = int(kv_tokens / model.max_context_tokens * 512)
    bounded = max(min(estimate, rules.running_requests_most), rules.running_requests_least)
    return max(1, min(bounded, kv_tokens // 2))


def default_speculative_running_requests(engine: EngineSpec) -> int | None:
    """Return the requests that a server which speculates runs at once, all ranks together.

    SGLang `speculative_hook.py` sets 48 where nothing else is asked for; vLLM's default (None here)
    does not depend on speculation.
    """
    rules = rules_for(engine).rules
    return rules.speculative_running_requests if isinstance(rules, SglangRules) else None


def captured_batch_sizes(
    engine: EngineSpec, gpu: GpuSpec, tp: int, running_requests: int, query_tokens: int = 1
) -> tuple[int, ...]:
    """Return the decode batch sizes captured in CUDA graphs; a batch pads up to the next one.

    Sizes and `running_requests` are those of one attention-DP rank. `query_tokens`: tokens that
    each request computes, more than one when speculating (TensorRT-LLM counts requests).
    """
    rules = rules_for(engine).rules
    if isinstance(rules, TrtllmRules):
        return _trtllm_captured_sizes(rules, running_requests)
    if isinstance(rules, VllmRules):
        return _vllm_captured_sizes(running_requests, query_tokens)
    most = min(default_graph_batch(rules, gpu, tp), running_requests)
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)]
    if query_tokens > 1:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]
        sizes += range(272, most + 1, 16)
    return tuple(sorted({size for size in sizes if size <= most} | {most}))


def _vllm_captured_sizes(running_requests: int, query_tokens: int) -> tuple[int, ...]:
    """Return vLLM's sizes: it captures token counts, rounded up to whole requests.

    `_set_cudagraph_sizes` and `adjust_cudagraph_sizes_for_spec_decode`: at most 512 tokens; a count
    that is rounded beyond the largest is dropped.
    """
    most = min(2 * running_requests * query_tokens, 512)
    tokens = [1, 2, 4, *range(8, 257, 8), *range(272, most + 1, 16)]
    requests = {-(-count // query_tokens) for count in tokens if count <= most}
    return tuple(sorted(count for count in requests if count * query_tokens <= most))


def _trtllm_captured_sizes(rules: TrtllmRules, running_requests: int) -> tuple[int, ...]:
    """Return TensorRT-LLM's sizes with padding: 1, 2, 4, eights to 128, steps, and the largest.

    `BaseCudaGraphConfig._generate_cuda_graph_batch_sizes`, with the server's batch as the most that
    is captured, as recipes set it: the default alone stops at 128 requests without padding.
    """
    step = rules.graph_padding_step
    sizes = [1, 2, 4, *range(8, 129, 8), *range(128 + step, running_requests + 1, step)]
    return tuple(sorted({size for size in sizes if size <= running_requests} | {running_requests}))


def captured_prefill_sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Return the token counts that SGLang captures for prefill."""
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    sizes += [*range(1280, 4097, 256), *range(4608, chunk_tokens + 1, 512)]
    return tuple(size for size in sizes if size <= chunk_tokens)


def default_graph_batch(rules: SglangRules, gpu: GpuSpec, tp: int) -> int:
    """Return the largest decode batch that SGLang captures."""
    tier = _tier(rules, gpu)
    return tier.graph_batch_below_tp4 if tp < 4 else tier.graph_batch


def _tier(rules: SglangRules, gpu: GpuSpec) -> MemoryTier:
    return next(tier for tier in rules.tiers if gpu.memory_bytes / MIB < tier.below_mib)


def _is_large_for_vllm(gpu: GpuSpec) -> bool:
    # vLLM leaves the A100 out by name, whatever its memory.
    return gpu.memory_bytes >= _VLLM_LARGE_GIB * GIB and not gpu.name.startswith("a100")
