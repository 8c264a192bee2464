"""How fine a grid is measured, by device and whether it is a quick one."""

from __future__ import annotations

from dataclasses import dataclass

# (batch, new tokens) of prompts, as far as they fit.
Prompts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The values of every axis; shapes beside those of the models are `generic`.

    `call_s_most`: a point whose call should take longer is left out. `samples`, `sample_s` and
    `budget_s` are those of `kernels.timing.Method`.
    """

    rows: tuple[int, ...]  # of products and small operators
    generic_rows: tuple[int, ...]
    generic_widths: tuple[int, ...]
    generic_formats: tuple[str, ...]
    tokens: tuple[int, ...]  # of routed experts
    generic_experts: tuple[tuple[int, int, int, int], ...]  # experts, top_k, hidden, inter
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    cached_tokens_most: int  # of all requests of a batch
    generic_heads: tuple[tuple[int, int, int], ...]  # heads, KV heads, numbers of a head
    generic_latent_heads: tuple[int, ...]
    prompts: Prompts
    small_rows: tuple[int, ...]
    small_widths: tuple[int, ...]
    checked_pages: tuple[tuple[int, int], ...]  # requests, pages of each
    moved_tokens: tuple[int, ...]  # written to a cache, or copied
    call_s_most: float
    samples: int
    sample_s: float
    budget_s: float
    repeats: int  # of an outlier, at most


_OFF_BY_ONE = (17, 65, 129, 257)
_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PREFILL_ROWS = (512, 1024, 2048, 4096, 8192, 16384)
_SMALL_ROWS = (1, 4, 16, 64, 256, 1024)


def _rows(*more: int) -> tuple[int, ...]:
    return tuple(sorted({*_DECODE_ROWS, *_OFF_BY_ONE, *more}))


CPU_QUICK = Sizes(
    rows=_rows(3, 6, 12, 24, 48, 512, 1024),
    generic_rows=(1, 2, 3, 4, 8, 16, 32, 48, 64, 128, 256, 512),
    generic_widths=(256, 512, 1024, 2048, 4096),
    generic_formats=("bf16", "int4_g128"),
    tokens=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512),
    generic_experts=((8, 2, 512, 1024), (32, 4, 1024, 256)),
    batches=(1, 4, 8, 16, 32),
    contexts=(1, 128, 256, 512, 1024, 2048),
    cached_tokens_most=32_768,
    generic_heads=((16, 8, 64), (8, 4, 64), (16, 4, 64), (8, 2, 128)),
    generic_latent_heads=(8, 16),
    prompts=tuple(
        (batch, new)
        for batch, most in ((1, 2048), (4, 512))
        for new in (16, 64, 128, 256, 512, 1024, 2048)
        if new <= most
    ),
    small_rows=_SMALL_ROWS,
    small_widths=(64, 512, 2048, 8192),
    checked_pages=((1, 128), (8, 128), (32, 128), (8, 4096), (32, 4096), (256, 4096)),
    moved_tokens=(1, 8, 64, 512, 4096),
    call_s_most=0.08,
    samples=5,
    sample_s=2e-3,
    budget_s=0.2,
    repeats=1,
)
CPU_FULL = Sizes(
    rows=_rows(3, 6, 12, 24, 48, 96, *_PREFILL_ROWS),
    generic_rows=_rows(3, 12, 24, 48, *_PREFILL_ROWS[:3]),
    generic_widths=(128, 256, 512, 1024, 2048, 4096),
    generic_formats=("bf16", "fp8", "int4_g128"),
    tokens=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048),
    generic_experts=(
        *((8, 2, 512, 1024), (32, 4, 1024, 256), (64, 6, 1024, 512), (16, 2, 1024, 1024)),
    ),
    batches=(1, 2, 4, 8, 16, 32, 64, 128),
    contexts=(1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    cached_tokens_most=131_072,
    generic_heads=(
        *((8, 8, 64), (16, 8, 64), (8, 4, 64), (16, 4, 64), (32, 4, 64)),
        *((8, 2, 128), (16, 8, 128), (32, 8, 128)),
    ),
    generic_latent_heads=(8, 16, 32),
    prompts=tuple(
        (batch, new)
        for batch, most in ((1, 16384), (4, 4096), (16, 1024))
        for new in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
        if new <= most
    ),
    small_rows=(*_SMALL_ROWS, 4096),
    small_widths=(64, 256, 512, 1024, 2048, 4096, 8192, 16384),
    checked_pages=(
        *((1, 128), (8, 128), (32, 128), (256, 128), (1, 1024), (8, 4096), (32, 4096)),
        *((256, 4096), (256, 16384)),
    ),
    moved_tokens=(1, 8, 64, 512, 4096, 16384),
    call_s_most=0.4,
    samples=9,
    sample_s=4e-3,
    budget_s=0.5,
    repeats=2,
)
_GPU_WIDTHS = (1024, 2048, 4096, 7168, 8192, 16384)
GPU_QUICK = Sizes(
    rows=(1, 16, 64, 65, 256, 4096),
    generic_rows=(1, 64, 4096),
    generic_widths=(2048, 8192),
    generic_formats=("bf16",),
    tokens=(1, 8, 64, 512, 4096),
    generic_experts=(),
    batches=(1, 16, 128),
    contexts=(1, 1024, 8192, 65536),
    cached_tokens_most=2_097_152,
    generic_heads=((32, 8, 128),),
    generic_latent_heads=(16,),
    prompts=((1, 512), (1, 2048), (1, 8192), (1, 16384), (4, 1024)),
    small_rows=(1, 1024),
    small_widths=(512, 8192),
    checked_pages=((1, 128), (32, 4096), (256, 16384)),
    moved_tokens=(1, 256, 4096),
    call_s_most=0.03,
    samples=10,
    sample_s=1e-3,
    budget_s=0.1,
    repeats=1,
)
GPU_FULL = Sizes(
    rows=_rows(*_PREFILL_ROWS),
    generic_rows=(*_DECODE_ROWS, 1024, 4096, 16384),
    generic_widths=_GPU_WIDTHS,
    generic_formats=("bf16",),
    tokens=(*_DECODE_ROWS, 512, 1024, 4096, 16384),
    generic_experts=((256, 8, 7168, 256),),
    batches=(1, 8, 32, 128, 256),
    contexts=(1, 256, 1024, 4096, 16384, 65536),
    cached_tokens_most=8_388_608,
    generic_heads=((32, 8, 128), (64, 8, 128), (8, 1, 128)),
    generic_latent_heads=(8, 16, 64, 128),
    prompts=tuple(
        (batch, new)
        for batch, most in ((1, 16384), (4, 4096), (16, 1024))
        for new in (128, 512, 1024, 2048, 4096, 8192, 16384)
        if new <= most
    ),
    small_rows=(1, 16, 256, 4096, 16384),
    small_widths=(512, 2048, 8192),
    checked_pages=((1, 128), (8, 4096), (32, 4096), (128, 16384), (256, 16384)),
    moved_tokens=(1, 64, 1024, 16384),
    call_s_most=0.3,
    samples=20,
    sample_s=1e-3,
    budget_s=0.3,
    repeats=2,
)


def sizes_for(device: str, quick: bool) -> Sizes:
    """Return the grid's sizes of a device, `cpu` or `cuda`."""
    if device == "cpu":
        return CPU_QUICK if quick else CPU_FULL
    return GPU_QUICK if quick else GPU_FULL
