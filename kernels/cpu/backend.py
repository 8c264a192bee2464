"""Which kernels a CPU runs, and by which function: pure data, importing no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tonnage.kernels.spec import KernelSpec

CPU = "tonnage.kernels.cpu"

RUNS: Mapping[str, str] = {
    "gqa_write_fp8": f"{CPU}.cache:write_gqa",
    "mla_write_fp8": f"{CPU}.cache:write_mla",
    "dsa_write_fp8": f"{CPU}.cache:write_dsa",
    "kv_copy_bf16": f"{CPU}.cache:copy",
    "kv_copy_fp8": f"{CPU}.cache:copy",
    "tag_check": f"{CPU}.tags:check",
    "noop": f"{CPU}.tags:nothing",
    "gqa_decode_bf16": f"{CPU}.attention:gqa_decode",
    "gqa_decode_fp8": f"{CPU}.attention:gqa_decode",
    "mla_decode_bf16": f"{CPU}.attention:mla_decode",
    "mla_decode_fp8": f"{CPU}.attention:mla_decode",
    "gqa_prefill_bf16": f"{CPU}.attention:gqa_prefill",
    "gqa_prefill_fp8": f"{CPU}.attention:gqa_prefill",
    "gemm_int4_g32": f"{CPU}.gemm_int4:run",
    "gemm_int4_g64": f"{CPU}.gemm_int4:run",
    "gemm_int4_g128": f"{CPU}.gemm_int4:run",
    "gemm_int4_g128_zp": f"{CPU}.gemm_int4:run",
    "gemm_fp8_tensor": f"{CPU}.gemm_fp8:run_tensor",
    "gemm_fp8_row": f"{CPU}.gemm_fp8:run_row",
    "gemm_fp8_block": f"{CPU}.gemm_fp8:run_block",
    "moe_gemm_fp8_row": f"{CPU}.moe:run_fp8_row",
    "moe_gemm_fp8_block": f"{CPU}.moe:run_fp8_block",
    "moe_gemm_int4_g32": f"{CPU}.moe:run_int4",
    "moe_gemm_int4_g128": f"{CPU}.moe:run_int4",
}

# Packing done once per weight, outside what is timed.
PREPARES: Mapping[str, str] = {
    name: f"{CPU}.gemm_int4:prepare" for name in RUNS if "gemm_int4" in name
}

# Kernels that a CPU does not run, and why.
NONE: Mapping[str, str] = {
    "gemm_nvfp4": "NVFP4 is what Blackwell's tensor cores read; torch has no CPU kernel for it",
}


def with_cpu(spec: KernelSpec) -> KernelSpec:
    """Return the kernel with its CPU backend, if it has one and does not name it already."""
    if "cpu" in spec.runs or spec.name not in RUNS:
        return spec
    prepares = {"cpu": PREPARES[spec.name]} if spec.name in PREPARES else {}
    return replace(
        spec,
        runs={**spec.runs, "cpu": RUNS[spec.name]},
        prepares={**spec.prepares, **prepares},
    )
