"""The attention kernels over paged caches."""

from __future__ import annotations

from functools import partial

from tonnage.kernels.cache_specs import OPS, PAGE_TOKENS, RAGGED
from tonnage.kernels.spec import Axes, KernelSpec

ROW_NUMBERS = 576  # an MLA row: 512 of latent, 64 of rope key
LATENT_NUMBERS = 512


def gqa_decode_flops(axes: Axes) -> float:
    """Count two dots of head_dim per head and context token."""
    return 4.0 * axes["batch"] * axes["heads"] * axes["head_dim"] * axes["context_tokens"]


def gqa_decode_bytes(axes: Axes, element_bytes: int) -> float:
    """Count K and V of the contexts, queries and outputs in bf16, and the page tables."""
    cache = 2.0 * element_bytes * axes["kv_heads"] * axes["head_dim"] * axes["context_tokens"]
    ends = 4.0 * axes["heads"] * axes["head_dim"]
    return axes["batch"] * (cache + ends + 4.0 * axes["context_tokens"] / axes["page_tokens"])


def _decode_examples(**shape: int) -> tuple[Axes, ...]:
    sizes = ((1, 1, 16, 0), (2, 17, 64, 1), (3, 65, 16, 1), (1, 129, 1, 0), (1, 300, 64, 0))
    names = ("batch", "context_tokens", "page_tokens", "ragged")
    return tuple({**dict(zip(names, size, strict=True)), **shape} for size in sizes)


def _gqa_decode(cache: str, element_bytes: int) -> KernelSpec:
    return KernelSpec(
        name=f"gqa_decode_{cache}",
        summary=f"decode attention, grouped queries, {cache} paged cache",
        axes={
            "batch": "requests, one new token each",
            "heads": "query heads",
            "kv_heads": "KV heads",
            "head_dim": "numbers per head, of K and of V",
            "context_tokens": "tokens in the cache of a request",
            "page_tokens": PAGE_TOKENS,
            "ragged": RAGGED,
        },
        flops=gqa_decode_flops,
        bytes=partial(gqa_decode_bytes, element_bytes=element_bytes),
        inputs=f"{OPS}.gqa_decode_reference:make_{cache}_inputs",
        reference_function=f"{OPS}.gqa_decode_reference:reference",
        runs={"triton": f"{OPS}.gqa_decode:run"},
        tolerances={"output": 1e-2},
        examples=(
            *_decode_examples(heads=8, kv_heads=2, head_dim=64),
            _decode_examples(heads=20, kv_heads=1, head_dim=128)[2],
        ),
        configs_name=f"{OPS}.gqa_decode:{cache.upper()}_CONFIGS",
        capability_min=89 if cache == "fp8" else 80,
    )


def mla_decode_flops(axes: Axes) -> float:
    """Count a dot of 576 and one of 512 per head and context token."""
    dots = 2.0 * (ROW_NUMBERS + LATENT_NUMBERS)
    return dots * axes["batch"] * axes["heads"] * axes["context_tokens"]


def mla_decode_bytes(axes: Axes, element_bytes: int) -> float:
    """Count the latents of the contexts, queries and outputs in bf16, and the page tables."""
    cache = float(element_bytes) * ROW_NUMBERS * axes["context_tokens"]
    ends = 2.0 * axes["heads"] * (ROW_NUMBERS + LATENT_NUMBERS)
    return axes["batch"] * (cache + ends + 4.0 * axes["context_tokens"] / axes["page_tokens"])


def _mla_decode(cache: str, element_bytes: int) -> KernelSpec:
    return KernelSpec(
        name=f"mla_decode_{cache}",
        summary=f"decode attention, MLA latents, {cache} paged cache",
        axes={
            "batch": "requests, one new token each",
            "heads": "query heads",
            "context_tokens": "tokens in the cache of a request",
            "page_tokens": PAGE_TOKENS,
            "ragged": RAGGED,
        },
        flops=mla_decode_flops,
        bytes=partial(mla_decode_bytes, element_bytes=element_bytes),
        inputs=f"{OPS}.mla_decode_reference:make_{cache}_inputs",
        reference_function=f"{OPS}.mla_decode_reference:reference",
        runs={"triton": f"{OPS}.mla_decode:run"},
        tolerances={"output": 1e-2},
        examples=_decode_examples(heads=16),
        configs_name=f"{OPS}.mla_decode:{cache.upper()}_CONFIGS",
        capability_min=89 if cache == "fp8" else 80,
    )


def gqa_prefill_flops(axes: Axes) -> float:
    """Count two dots of head_dim per head and pair of a new token and one it may see."""
    new, prefix = axes["new_tokens"], axes["prefix_tokens"]
    pairs = new * prefix + new * (new + 1) / 2
    return 4.0 * axes["batch"] * axes["heads"] * axes["head_dim"] * pairs


def gqa_prefill_bytes(axes: Axes, element_bytes: int) -> float:
    """Count K and V of the contexts once, queries and outputs in bf16, and the page tables."""
    tokens = axes["prefix_tokens"] + axes["new_tokens"]
    cache = 2.0 * element_bytes * axes["kv_heads"] * axes["head_dim"] * tokens
    ends = 4.0 * axes["heads"] * axes["head_dim"] * axes["new_tokens"]
    return axes["batch"] * (cache + ends + 4.0 * tokens / axes["page_tokens"])


def _gqa_prefill(cache: str, element_bytes: int) -> KernelSpec:
    names = ("batch", "prefix_tokens", "new_tokens", "page_tokens", "ragged")
    sizes = ((1, 0, 1, 16, 0), (2, 17, 65, 64, 1), (1, 70, 129, 16, 0), (2, 129, 17, 1, 1))
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    return KernelSpec(
        name=f"gqa_prefill_{cache}",
        summary=f"prefill attention, cached prefix, grouped queries, {cache} paged cache",
        axes={
            "batch": "requests",
            "heads": "query heads",
            "kv_heads": "KV heads",
            "head_dim": "numbers per head, of K and of V",
            "prefix_tokens": "tokens in the cache before",
            "new_tokens": "tokens to prefill of a request",
            "page_tokens": PAGE_TOKENS,
            "ragged": RAGGED,
        },
        flops=gqa_prefill_flops,
        bytes=partial(gqa_prefill_bytes, element_bytes=element_bytes),
        inputs=f"{OPS}.gqa_prefill_reference:make_{cache}_inputs",
        reference_function=f"{OPS}.gqa_prefill_reference:reference",
        runs={"triton": f"{OPS}.gqa_prefill:run"},
        tolerances={"output": 1e-2},
        examples=tuple({**dict(zip(names, size, strict=True)), **shape} for size in sizes),
        configs_name=f"{OPS}.gqa_prefill:{cache.upper()}_CONFIGS",
        capability_min=89 if cache == "fp8" else 80,
    )


ATTENTION_KERNELS: tuple[KernelSpec, ...] = (
    _gqa_decode("bf16", 2),
    _gqa_decode("fp8", 1),
    _mla_decode("bf16", 2),
    _mla_decode("fp8", 1),
    _gqa_prefill("bf16", 2),
    _gqa_prefill("fp8", 1),
)
