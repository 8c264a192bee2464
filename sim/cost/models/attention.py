"""What one call of an attention kernel computes and reads, and the physical form of its time.

Shared by the decode and the prefill model. Shapes are those of one rank: local heads, local KV
heads. Units: tokens, bytes, FLOP, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.cost.models.grid import monotone
from tonnage.sim.domain import FloatArray, GqaAttention, MlaAttention, ParallelLayout
from tonnage.sim.model.formats import KV_ELEMENT_BYTES
from tonnage.sim.model.kv import kv_heads_per_gpu

Content = Literal["kernel", "module"]

NO_PROJECTION = "none"  # projection format of rows that hold the attention kernel alone

# Multi-head latent attention as DeepSeek-V3, Kimi-K2 and GLM-5 have it (their config.json): one
# latent of 512 + 64 per token. Prefill multiplies it out: 128 + 64 for scores, 128 for values.
LATENT_DIM, ROPE_DIM = 512, 64
MLA_HEAD_DIM = LATENT_DIM + ROPE_DIM
_MLA_PREFILL_WIDTH = 128 + 64 + 128
_MLA_ABSORBED_WIDTH = 2 * LATENT_DIM + ROPE_DIM

# DeepSeek sparse attention: at most 2048 tokens are read, those that an FP8 indexer of 128 + 4 B
# per cached token picks. FlashMLA's FP8 latent is 512 + 16 + 128 B (sim/model/kv.py).
SPARSE_TOP_K = 2048
_INDEX_BYTES_PER_TOKEN = 132.0
# Up to 8 sequences are scored in the time of one (H200 and B200: 0.5 us per 1k tokens of context
# for 1, 2, 4 and 8 sequences; 0.07 us per 1k cached tokens of all sequences from 8 on).
_INDEXED_AT_ONCE = 8.0
_SPARSE_FP8_BYTES_PER_TOKEN = 656.0

_MONOTONE_SWEEPS = 20
_MONOTONE_TOLERANCE = 1e-3

DSA_KINDS = ("dsa_full", "dsa_shared")
MLA_KINDS = ("mla", "mla_absorbed")
KINDS = ("gqa", *MLA_KINDS, *DSA_KINDS)


class Rates(Protocol):
    """The datasheet's rates that a roofline needs; `GpuSpec` has them."""

    @property
    def memory_bandwidth_bytes_per_s(self) -> float: ...

    @property
    def dense_flops_per_s(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One rank's share of an attention layer, as a kernel sees it.

    `kind`: gqa; mla; mla_absorbed (prefill that keeps the latent, as SGLang does over a cached
    prefix of less than 8192 tokens); dsa_full (owns its indexer) and dsa_shared (takes another
    layer's selection). `projection_format` and `hidden_size` tell modules apart, whose rows hold
    the projections too.
    """

    kind: str
    kv_format: str
    heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    projection_format: str = NO_PROJECTION
    hidden_size: int | None = None

    @property
    def group(self) -> float:
        """Query heads per KV head."""
        return self.heads / self.kv_heads

    @property
    def limit_tokens(self) -> int | None:
        """Most tokens of context that one query reads, None without a limit."""
        return SPARSE_TOP_K if self.kind in DSA_KINDS else self.window_tokens


def attention_shape(
    attention: GqaAttention | MlaAttention,
    layout: ParallelLayout,
    kv_format: str,
    projection_format: str = NO_PROJECTION,
    hidden_size: int | None = None,
) -> AttentionShape:
    """Return the shape of one rank's attention; the last two matter to sparse layers alone."""
    # Under dcp a rank serves the heads of all dcp ranks on its share of the context.
    heads = max(1, attention.heads * layout.dcp // layout.attention_tp)
    if isinstance(attention, GqaAttention):
        kv_heads = int(kv_heads_per_gpu(attention, layout))
        window = attention.window_tokens
        return AttentionShape("gqa", kv_format, heads, kv_heads, attention.head_dim, window)
    if attention.sparse_top_k is None:
        return AttentionShape("mla", kv_format, heads, 1, MLA_HEAD_DIM)
    kind = "dsa_shared" if attention.indexer is None else "dsa_full"
    return AttentionShape(
        kind, kv_format, heads, 1, MLA_HEAD_DIM, None, projection_format, hidden_size
    )


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What calls of a kernel have to do, one number per call or one for all.

    `streams`: sequences times KV heads, what a grid of thread blocks is made of. `tokens`: query
    tokens. `index_bytes`: read by the indexer.
    """

    heads: float
    streams: ArrayLike
    tokens: ArrayLike
    read_bytes: FloatArray
    flops: FloatArray
    index_bytes: FloatArray


def kv_bytes_per_token(shape: AttentionShape) -> float:
    """Return the bytes of KV that one layer of one rank reads per token of context."""
    element_bytes = KV_ELEMENT_BYTES[shape.kv_format]
    if shape.kind == "gqa":
        return 2.0 * shape.kv_heads * shape.head_dim * element_bytes
    if shape.kind in DSA_KINDS and element_bytes == 1:
        return _SPARSE_FP8_BYTES_PER_TOKEN
    return float(MLA_HEAD_DIM * element_bytes)


def flops_per_pair(shape: AttentionShape, prefill: bool) -> float:
    """Return the FLOP of all heads per pair of query and key: scores and values."""
    if shape.kind == "gqa":
        return 4.0 * shape.heads * shape.head_dim
    decompressed = prefill and shape.kind == "mla"
    return 2.0 * shape.heads * (_MLA_PREFILL_WIDTH if decompressed else _MLA_ABSORBED_WIDTH)


def decode_work(shape: AttentionShape, batch: ArrayLike, context_tokens: ArrayLike) -> Work:
    """Return the work of one new token for each of `batch` sequences of one context length."""
    sequences = np.asarray(batch, dtype=np.float64)
    context = np.asarray(context_tokens, dtype=np.float64)
    limit = shape.limit_tokens
    read = sequences * (context if limit is None else np.minimum(context, limit))
    is_indexed = 1.0 if shape.kind == "dsa_full" else 0.0
    return Work(
        shape.heads,
        sequences * shape.kv_heads,
        sequences,
        read * kv_bytes_per_token(shape),
        read * flops_per_pair(shape, prefill=False),
        is_indexed * np.maximum(sequences, _INDEXED_AT_ONCE) * context * _INDEX_BYTES_PER_TOKEN,
    )


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """``launch + head h + stream s + token n + index/B_i + ((bytes/B)^p + (FLOP/P)^p)^(1/p)``.

    The form of facts/kernels.md part C; a residual table corrects what it misses.
    """

    launch_s: float
    head_s: float
    stream_s: float
    token_s: float
    bytes_per_s: float
    flops_per_s: float
    index_bytes_per_s: float
    sharpness: float

    def seconds(self, work: Work) -> FloatArray:
        """Return the seconds of every call."""
        terms = (work.read_bytes / self.bytes_per_s, work.flops / self.flops_per_s)
        total: FloatArray = self.stream_s * np.asarray(work.streams, dtype=np.float64)
        total = total + self.token_s * np.asarray(work.tokens)
        total = total + self.launch_s + self.head_s * work.heads
        total = total + work.index_bytes / self.index_bytes_per_s
        return total + smooth_max(*terms, self.sharpness)

    def to_json(self) -> dict[str, float]:
        """Return the parameters as a profile's header keeps them."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AttentionForm:
        """Return the form of a profile's header."""
        return cls(**{name: float(values[name]) for name in cls.__slots__})


def smooth_max(one: FloatArray, other: FloatArray, sharpness: float) -> FloatArray:
    """Return ``(a^p + b^p)^(1/p)``, scaled by the larger so that no power underflows."""
    larger = np.maximum(np.maximum(one, other), 1e-30)
    powers = (one / larger) ** sharpness + (other / larger) ** sharpness
    return np.asarray(larger * powers ** (1.0 / sharpness))


def datasheet_form(rates: Rates) -> AttentionForm:
    """Return the roofline: no launch, the datasheet's bandwidth and BF16 peak."""
    bandwidth = rates.memory_bandwidth_bytes_per_s
    peak = rates.dense_flops_per_s["bf16"]
    return AttentionForm(0.0, 0.0, 0.0, 0.0, bandwidth, peak, bandwidth, np.inf)


def monotone_surface(seconds: FloatArray) -> FloatArray:
    """Return values `[rows, columns]` that fall along neither axis; NaN stays NaN.

    Isotonic regression of the logs along one axis and then the other, over and over; what is left
    after that (below a thousandth) goes in a running maximum.
    """
    logs = np.log(seconds)
    for _ in range(_MONOTONE_SWEEPS):
        logs, fell = _rising_rows(logs)
        turned, fell_across = _rising_rows(logs.T)
        logs = turned.T
        if max(fell, fell_across) < _MONOTONE_TOLERANCE:
            break
    highest = np.fmax.accumulate(np.fmax.accumulate(logs, axis=0), axis=1)
    return np.asarray(np.exp(np.where(np.isnan(logs), np.nan, highest)))


def _rising_rows(logs: FloatArray) -> tuple[FloatArray, float]:
    """Return the rows made non-decreasing, and by how much the worst of them fell."""
    drops = np.fmax.accumulate(logs, axis=1) - logs
    drops[np.isnan(drops)] = 0.0
    falling = drops.max(axis=1) > 0
    if not falling.any():
        return logs, 0.0
    risen = logs.copy()
    risen[falling] = monotone(logs[falling], axis=1)
    return risen, float(drops.max())
