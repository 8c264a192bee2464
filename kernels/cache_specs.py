"""The kernels that write, copy and check paged caches."""

from __future__ import annotations

from functools import partial

from tonnage.kernels.spec import Axes, KernelSpec

OPS = "tonnage.kernels.ops"
SLOT_BYTES = 8  # int64
ENTRY_BYTES = 4  # page numbers, tags and counts are int32

PAGE_TOKENS = "tokens a page holds"
RAGGED = "0: all requests alike; 1: sizes from empty to the full one, for checks"
WRITE_AXES = {"tokens": "new tokens, about one in eight unwritten", "page_tokens": PAGE_TOKENS}


def gqa_write_flops(axes: Axes) -> float:
    """Count one division per number of K and of V."""
    return 2.0 * axes["tokens"] * axes["kv_heads"] * axes["head_dim"]


def gqa_write_bytes(axes: Axes) -> float:
    """Count K and V read as bf16 and written as e4m3, and the slots."""
    return axes["tokens"] * (6.0 * axes["kv_heads"] * axes["head_dim"] + SLOT_BYTES)


def mla_write_flops(axes: Axes, divided: int) -> float:
    """Count one division per number quantised."""
    return float(axes["tokens"] * divided)


def mla_write_bytes(axes: Axes, row_bytes: int) -> float:
    """Count 576 numbers read as bf16, the row written and the slot."""
    return float(axes["tokens"] * (2 * 576 + row_bytes + SLOT_BYTES))


def copy_flops(axes: Axes, divided: int) -> float:
    """Count one division per number where the target is quantised."""
    return float(divided * axes["requests"] * axes["tokens"] * axes["row"])


def copy_bytes(axes: Axes, target_bytes: int) -> float:
    """Count every number read as bf16 and written, and both page tables."""
    pages = sum(-(-axes["tokens"] // axes[name]) for name in ("page_tokens", "target_page_tokens"))
    numbers = axes["tokens"] * axes["row"]
    return float(axes["requests"] * (numbers * (2 + target_bytes) + pages * ENTRY_BYTES))


def tag_bytes(axes: Axes) -> float:
    """Count table, ledger page, ledger tag and live tag of every entry, and the two results."""
    return float(axes["requests"] * (axes["pages"] * 4 + 3) * ENTRY_BYTES)


def nothing(axes: Axes) -> float:
    """Count nothing."""
    return 0.0


def _write_examples(**row: int) -> tuple[Axes, ...]:
    sizes = ((1, 16), (17, 1), (65, 64))
    return tuple({"tokens": tokens, "page_tokens": page, **row} for tokens, page in sizes)


GQA_WRITE = KernelSpec(
    name="gqa_write_fp8",
    summary="quantise K and V to FP8 and write them to a paged cache",
    axes={**WRITE_AXES, "kv_heads": "KV heads", "head_dim": "numbers per head"},
    flops=gqa_write_flops,
    bytes=gqa_write_bytes,
    inputs=f"{OPS}.cache_write_reference:make_gqa_inputs",
    reference_function=f"{OPS}.cache_write_reference:gqa_reference",
    runs={"triton": f"{OPS}.cache_write:run_gqa"},
    tolerances={"key_cache": 0.0, "value_cache": 0.0},
    examples=(
        *_write_examples(kv_heads=2, head_dim=64),
        {"tokens": 9, "page_tokens": 16, "kv_heads": 3, "head_dim": 128},
    ),
    configs_name=f"{OPS}.cache_write:GQA_CONFIGS",
    capability_min=89,
)

MLA_WRITE = KernelSpec(
    name="mla_write_fp8",
    summary="quantise MLA latents and rope keys to FP8 and write them to a paged cache",
    axes=WRITE_AXES,
    flops=partial(mla_write_flops, divided=576),
    bytes=partial(mla_write_bytes, row_bytes=576),
    inputs=f"{OPS}.cache_write_reference:make_mla_inputs",
    reference_function=f"{OPS}.cache_write_reference:mla_reference",
    runs={"triton": f"{OPS}.cache_write:run_mla"},
    tolerances={"cache": 0.0},
    examples=(*_write_examples(), {"tokens": 129, "page_tokens": 16}),
    configs_name=f"{OPS}.cache_write:MLA_CONFIGS",
    capability_min=89,
)

DSA_WRITE = KernelSpec(
    name="dsa_write_fp8",
    summary="quantise MLA latents by tiles of 128 and write 656-byte rows to a paged cache",
    axes=WRITE_AXES,
    flops=partial(mla_write_flops, divided=512),
    bytes=partial(mla_write_bytes, row_bytes=656),
    inputs=f"{OPS}.cache_write_reference:make_dsa_inputs",
    reference_function=f"{OPS}.cache_write_reference:dsa_reference",
    runs={"triton": f"{OPS}.cache_write:run_dsa"},
    tolerances={"cache": 0.0},
    examples=_write_examples(),
    configs_name=f"{OPS}.cache_write:DSA_CONFIGS",
    capability_min=89,
)


def _copy_spec(target: str, target_bytes: int) -> KernelSpec:
    shapes = ((1, 1, 576, 16, 64), (3, 65, 576, 64, 16), (4, 129, 128, 16, 16), (2, 17, 1024, 1, 8))
    names = ("requests", "tokens", "row", "page_tokens", "target_page_tokens")
    return KernelSpec(
        name=f"kv_copy_{target}",
        summary=f"copy tokens from a bf16 paged cache to a {target} one",
        axes={
            "requests": "requests",
            "tokens": "tokens of a request",
            "row": "numbers of a token: K or V of all heads, or an MLA latent",
            "page_tokens": PAGE_TOKENS,
            "target_page_tokens": "tokens a page of the target holds",
            "ragged": RAGGED,
        },
        flops=partial(copy_flops, divided=int(target == "fp8")),
        bytes=partial(copy_bytes, target_bytes=target_bytes),
        inputs=f"{OPS}.kv_copy_reference:make_{target}_inputs",
        reference_function=f"{OPS}.kv_copy_reference:reference",
        runs={"triton": f"{OPS}.kv_copy:run"},
        tolerances={"target": 0.0},
        examples=tuple({**dict(zip(names, shape, strict=True)), "ragged": 1} for shape in shapes),
        configs_name=f"{OPS}.kv_copy:{target.upper()}_CONFIGS",
        capability_min=89 if target == "fp8" else 80,
    )


TAG_CHECK = KernelSpec(
    name="tag_check",
    summary="compare page-table rows and live tags with each request's ledger",
    axes={"requests": "requests", "pages": "page-table entries of a request", "ragged": RAGGED},
    flops=nothing,
    bytes=tag_bytes,
    inputs=f"{OPS}.tag_check_reference:make_inputs",
    reference_function=f"{OPS}.tag_check_reference:reference",
    runs={"triton": f"{OPS}.tag_check:run"},
    tolerances={"mismatches": 0.0, "first_bad": 0.0},
    examples=tuple(
        {"requests": requests, "pages": pages, "ragged": 1}
        for requests, pages in ((1, 1), (17, 17), (65, 65), (13, 129), (5, 1025), (4, 9000))
    ),
    configs_name=f"{OPS}.tag_check:CONFIGS",
)

NOOP = KernelSpec(
    name="noop",
    summary="do nothing: what a launch costs",
    axes={},
    flops=nothing,
    bytes=nothing,
    inputs=f"{OPS}.noop_reference:make_inputs",
    reference_function=f"{OPS}.noop_reference:reference",
    runs={"triton": f"{OPS}.noop:run"},
    tolerances={"untouched": 0.0},
    examples=({},),
    configs_name=f"{OPS}.noop:CONFIGS",
)

CACHE_KERNELS: tuple[KernelSpec, ...] = (
    GQA_WRITE,
    MLA_WRITE,
    DSA_WRITE,
    _copy_spec("bf16", 2),
    _copy_spec("fp8", 1),
    TAG_CHECK,
    NOOP,
)
