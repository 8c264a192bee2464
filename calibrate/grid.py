"""The grid of a calibration: every kernel that some models' layers need, and generic shapes beside.

Generic shapes are what a model that was not asked for is predicted from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tonnage.calibrate.points import Axes, Point
from tonnage.calibrate.sizes import Sizes
from tonnage.calibrate.wanted import ENGINE, Wanted
from tonnage.sim.cost.fused import fused_products
from tonnage.sim.cost.models.attention import LATENT_DIM, MLA_HEAD_DIM, attention_shape
from tonnage.sim.domain import GpuSpec, GqaAttention, MlaAttention, MoeMlp, Role

PAGE_TOKENS = 64
KV_SUFFIX = {"bf16": "bf16", "fp8_e4m3": "fp8"}
# Weight format -> the kernel of its products, and what quantises activations for it.
PRODUCTS = {
    "bf16": ("gemm_bf16", None),
    "fp16": ("gemm_bf16", None),
    "fp32": ("gemm_bf16", None),
    "fp8": ("gemm_fp8_row", "quantise_fp8_row"),
    "fp8_channel": ("gemm_fp8_row", "quantise_fp8_row"),
    "fp8_block": ("gemm_fp8_block", "quantise_fp8_block"),
    "int4_g32": ("gemm_int4_g32", None),
    "int4_g64": ("gemm_int4_g64", None),
    "int4_g128": ("gemm_int4_g128", None),
}
EXPERTS = {
    "bf16": "experts_bf16",
    "fp8": "experts_fp8",
    "fp8_channel": "experts_fp8",
    "fp8_block": "experts_fp8_block",
    "int4_g32": "experts_int4_g32",
    "int4_g128": "experts_int4_g128",
}
SMALL = ("norm", "rope", "gate", "add", "join", "route", "embed", "sample", "put")
_HEAD_ROWS_MOST = 512  # what is sampled in a step
_RANDOM_TOKENS = (4, 16, 64)  # routed at random, to test what is made of tokens routed in turn
_EIGHTH = 8  # of the memory is what one point may take
_FP8_K = 128  # FP8 and INT4 kernels take whole groups of so many inputs
_MLA_GENERIC_WIDTHS = (128, 64, 128)  # without rope, rope, value: DeepSeek-V3, Kimi-K2


@dataclass(frozen=True, slots=True)
class Grid:
    """What is to be measured, and the formats that no kernel serves."""

    points: tuple[Point, ...]
    unserved: tuple[str, ...]


def grid(wanted: Sequence[Wanted], sizes: Sizes, gpu: GpuSpec, on_gpu: bool) -> Grid:
    """Return what every model needs, points of some models' layers, and of generic shapes.

    In this order, so that a run that is ended early has measured what matters most.

    Points that should take longer than the sizes allow, or more memory than an eighth of the
    device's, are left out.
    """
    maker = _Maker(sizes, gpu, on_gpu)
    points = [
        *maker.launches(),
        *maker.small(wanted),
        *maker.pages(),
        *(point for one in wanted for point in maker.of_model(one)),
        *maker.generic_attention(),
        *maker.generic_products(),
        *maker.generic_experts(wanted),
    ]
    kept = {point.identity: point for point in reversed(points) if maker.fits(point)}
    return Grid(tuple(reversed(kept.values())), tuple(sorted(_unserved(wanted))))


def _unserved(wanted: Iterable[Wanted]) -> set[str]:
    found = set()
    for one in wanted:
        products = fused_products(one.model, one.layout, ENGINE)
        found |= {product.format for product, _ in products} - PRODUCTS.keys()
        found |= set(_expert_formats(one)) - EXPERTS.keys()
        found |= set(one.kv_formats) - KV_SUFFIX.keys()
        if one.layout.ep > 1:
            found.add(f"experts spread over {one.layout.ep} ranks")
    return found


def _expert_formats(one: Wanted) -> Iterator[str]:
    for layer in one.model.layers:
        yield from (tensor.format for tensor in layer.weights if tensor.role is Role.ROUTED_EXPERT)


@dataclass(frozen=True, slots=True)
class _Maker:
    sizes: Sizes
    gpu: GpuSpec
    on_gpu: bool

    # --- what a point takes ---------------------------------------------------------------------

    def point(
        self, kernel: str, axes: Axes, moved: float, flops: float, cold: bool = True
    ) -> Point:
        """Return a point whose call moves some bytes and computes some FLOP."""
        peak = self.gpu.dense_flops_per_s["bf16"]
        bandwidth = self.gpu.memory_bandwidth_bytes_per_s
        seconds = max(moved / bandwidth, flops / peak)
        return Point(
            kernel, axes, seconds, max(moved, _held_bytes(kernel, axes)), cold, self.on_gpu
        )

    def fits(self, point: Point) -> bool:
        """Say whether a point is quick and small enough."""
        is_small = point.held_bytes <= self.gpu.memory_bytes / _EIGHTH
        return is_small and point.estimate_s <= self.sizes.call_s_most

    def launches(self) -> Iterator[Point]:
        """Yield the kernel that does nothing, launched alone and in a graph."""
        for graph in (False, True) if self.on_gpu else (False,):
            yield Point("noop", {}, 0.0, 0.0, cold=False, graph=graph)

    # --- models ---------------------------------------------------------------------------------

    def of_model(self, one: Wanted) -> Iterator[Point]:
        """Yield what a rank of a model runs: products, experts and attention."""
        for product, _ in fused_products(one.model, one.layout, ENGINE):
            is_head = product.role in (Role.HEAD, Role.EMBEDDING)
            rows = [m for m in self.sizes.rows if not is_head or m <= _HEAD_ROWS_MOST]
            yield from self.product(product.format, rows, product.out_features, product.in_features)
        for layer in one.model.layers:
            if isinstance(layer.mlp, MoeMlp) and one.layout.ep == 1:
                mlp, ways = layer.mlp, one.layout.tp
                shape = (
                    mlp.experts,
                    mlp.top_k,
                    one.model.hidden_size,
                    mlp.intermediate_size // ways,
                )
                yield from self.experts(sorted(set(_expert_formats(one))), shape, ways)
            if isinstance(layer.attention, GqaAttention | MlaAttention):
                yield from self.attention(layer.attention, one)

    def attention(self, attention: GqaAttention | MlaAttention, one: Wanted) -> Iterator[Point]:
        """Yield decode and prefill attention of one kind of layer of a rank."""
        for kv_format in one.kv_formats:
            if kv_format not in KV_SUFFIX:
                continue
            shape = attention_shape(attention, one.layout, kv_format)
            if isinstance(attention, MlaAttention):
                widths = (attention.nope_dim, attention.rope_dim, attention.value_dim)
                yield from self.mla(shape.heads, widths, KV_SUFFIX[kv_format])
            else:
                yield from self.gqa(
                    shape.heads, shape.kv_heads, shape.head_dim, KV_SUFFIX[kv_format]
                )

    def caches(self) -> Iterator[tuple[int, int]]:
        """Yield batches and contexts of decode attention."""
        for batch in self.sizes.batches:
            for context in self.sizes.contexts:
                if batch * context <= self.sizes.cached_tokens_most:
                    yield batch, context

    def product(self, weight_format: str, rows: Iterable[int], n: int, k: int) -> Iterator[Point]:
        """Yield the products of a weight `[n, k]` with so many rows."""
        kernel, quantiser = PRODUCTS.get(weight_format, (None, None))
        if kernel is None or (weight_format not in ("bf16", "fp16", "fp32") and k % _FP8_K):
            return
        weight_bytes = 2.0 if kernel == "gemm_bf16" else 1.0
        for m in rows:
            moved, flops = n * k * weight_bytes + 2.0 * m * (n + k), 2.0 * m * n * k
            yield self.point(kernel, {"m": m, "n": n, "k": k}, moved, flops)
            if quantiser is not None:
                yield self.point(quantiser, {"m": m, "k": k}, 3.0 * m * k, 0.0, cold=False)

    def experts(
        self, formats: Iterable[str], shape: tuple[int, int, int, int], ways: int = 1
    ) -> Iterator[Point]:
        """Yield routed experts: tokens that take them in turn, a few at random."""
        experts, top_k, hidden, inter = shape
        names = ("experts", "top_k", "hidden", "inter")
        fixed = {**dict(zip(names, shape, strict=True)), "ways": ways}
        for weight_format in formats:
            if weight_format not in EXPERTS:
                continue
            for tokens in self.sizes.tokens:
                flops = 6.0 * tokens * top_k * hidden * inter
                moved = 6.0 * min(tokens * top_k, experts) * hidden * inter
                for balanced in (1, 0) if tokens in _RANDOM_TOKENS else (1,):
                    axes = {"tokens": tokens, **fixed, "balanced": balanced}
                    yield self.point(EXPERTS[weight_format], axes, moved, flops)

    def gqa(self, heads: int, kv_heads: int, head_dim: int, suffix: str) -> Iterator[Point]:
        """Yield decode and prefill attention of grouped queries."""
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        element_bytes = 2.0 if suffix == "bf16" else 1.0
        for batch, context in self.caches():
            moved = 2.0 * element_bytes * kv_heads * head_dim * batch * context
            flops = 4.0 * heads * head_dim * batch * context
            axes = {"batch": batch, **shape, "context_tokens": context, **_PAGED}
            yield self.point(f"gqa_decode_{suffix}", axes, moved, flops)
        for batch, new in self.sizes.prompts:
            moved = 4.0 * element_bytes * heads * head_dim * batch * new
            flops = 2.0 * heads * head_dim * batch * new * (new + 1)
            axes = {"batch": batch, **shape, "prefix_tokens": 0, "new_tokens": new, **_PAGED}
            yield self.point(f"gqa_prefill_{suffix}", axes, moved, flops, cold=False)

    def mla(self, heads: int, widths: tuple[int, int, int], suffix: str) -> Iterator[Point]:
        """Yield decode attention over latents, its products, and prefill without latents."""
        nope, rope, value = widths
        element_bytes = 2.0 if suffix == "bf16" else 1.0
        for batch, context in self.caches():
            moved = element_bytes * MLA_HEAD_DIM * batch * context
            flops = 2.0 * (MLA_HEAD_DIM + LATENT_DIM) * heads * batch * context
            axes = {"batch": batch, "heads": heads, "context_tokens": context, **_PAGED}
            yield self.point(f"mla_decode_{suffix}", axes, moved, flops)
        for rows in self.sizes.tokens:
            numbers = heads * (nope + value)
            axes = {"rows": rows, "heads": heads, "nope": nope, "value": value}
            moved = 2.0 * LATENT_DIM * numbers
            yield self.point("latent_products", axes, moved, rows * moved)
        for batch, new in self.sizes.prompts:
            key = nope + rope
            moved, pairs = 4.0 * heads * (key + value) * batch * new, new * (new + 1) / 2
            axes = {"batch": batch, "heads": heads, "key": key, "value": value}
            axes |= {"prefix_tokens": 0, "new_tokens": new}
            flops = 2.0 * heads * (key + value) * batch * pairs
            yield self.point("mla_prefill", axes, moved, flops, cold=False)

    # --- beside the models ----------------------------------------------------------------------

    def generic_products(self) -> Iterator[Point]:
        """Yield weights of every pair of generic widths."""
        for weight_format in self.sizes.generic_formats:
            for n in self.sizes.generic_widths:
                for k in self.sizes.generic_widths:
                    yield from self.product(weight_format, self.sizes.generic_rows, n, k)

    def generic_experts(self, wanted: Sequence[Wanted]) -> Iterator[Point]:
        """Yield generic experts in the formats of the models', or in all generic ones."""
        asked = {name for one in wanted for name in _expert_formats(one)}
        formats = sorted(asked or set(self.sizes.generic_formats))
        for shape in self.sizes.generic_experts:
            yield from self.experts(formats, shape)

    def generic_attention(self) -> Iterator[Point]:
        """Yield attention of generic heads with both KV formats."""
        for suffix in KV_SUFFIX.values():
            for shape in self.sizes.generic_heads:
                yield from self.gqa(*shape, suffix)
            for heads in self.sizes.generic_latent_heads:
                yield from self.mla(heads, _MLA_GENERIC_WIDTHS, suffix)

    def small(self, wanted: Sequence[Wanted]) -> Iterator[Point]:
        """Yield torch's operators on rows."""
        hidden = {one.model.hidden_size for one in wanted}
        for kernel in SMALL:
            for width in sorted({*self.sizes.small_widths, *hidden}):
                for rows in self.sizes.small_rows:
                    axes = {"rows": rows, "width": width}
                    yield self.point(kernel, axes, 6.0 * rows * width, 0.0, cold=False)

    def pages(self) -> Iterator[Point]:
        """Yield checks of page tags, writes to a cache, and copies between caches."""
        for requests, pages in self.sizes.checked_pages:
            axes = {"requests": requests, "pages": pages, "ragged": 0}
            yield self.point("tag_check", axes, 16.0 * requests * pages, 0.0)
        for tokens in self.sizes.moved_tokens:
            paged = {"tokens": tokens, "page_tokens": PAGE_TOKENS}
            yield self.point("mla_write_fp8", paged, 1728.0 * tokens, 0.0, cold=False)
            for kv_heads in (1, 4, 8):
                axes = {**paged, "kv_heads": kv_heads, "head_dim": 64}
                yield self.point("gqa_write_fp8", axes, 384.0 * kv_heads * tokens, 0.0, cold=False)
            for target in KV_SUFFIX.values():
                for row in (MLA_HEAD_DIM, 1024):
                    axes = {"requests": 1, "tokens": tokens, "row": row, "page_tokens": PAGE_TOKENS}
                    axes |= {"target_page_tokens": PAGE_TOKENS, "ragged": 0}
                    yield self.point(f"kv_copy_{target}", axes, 4.0 * tokens * row, 0.0)


_PAGED = {"page_tokens": PAGE_TOKENS, "ragged": 0}


def _held_bytes(kernel: str, axes: Axes) -> float:
    """Return what the weights of all experts take: more than a call with few tokens moves."""
    if not kernel.startswith("experts_"):
        return 0.0
    return 6.0 * axes["experts"] * axes["hidden"] * axes["inter"]
