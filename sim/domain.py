"""The types everybody shares: frozen, checked, in SI units, importing nobody.

Bytes, seconds, tokens, FLOP. ``None`` is unknown or absent, never a sentinel number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class TonnageError(Exception):
    """A condition the user can mend; its text is the whole message."""

    exit_code = 2


class BadInputError(TonnageError):
    """The input is wrong: the message names file, field and mend."""

    exit_code = 2


class InfeasibleError(TonnageError):
    """The input is right and does not fit: the message names what is missing and what would fit."""

    exit_code = 3


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadInputError(message)


# --- model geometry -----------------------------------------------------------------------------


class Shard(StrEnum):
    """How one weight tensor is spread over the ranks of an instance."""

    ATTENTION = "attention"  # split by attention heads: over tp / attention_dp ranks
    KV_HEADS = "kv_heads"  # as ATTENTION, but at most kv_heads ways; replicated beyond
    MLP = "mlp"  # split over tp ranks
    EXPERT = "expert"  # whole experts over ep ranks, each expert over tp / ep ranks
    VOCAB = "vocab"  # split over tp ranks by vocabulary
    REPLICATED = "replicated"  # every rank of the stage holds all of it


class Role(StrEnum):
    """What a weight tensor is for; itemises memory and picks the operator that reads it."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    ATTENTION = "attention"
    INDEXER = "indexer"
    DENSE_MLP = "dense_mlp"
    ROUTER = "router"
    SHARED_EXPERT = "shared_expert"
    ROUTED_EXPERT = "routed_expert"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One weight matrix `[copies, out_features, in_features]` and how it is stored and spread."""

    name: str
    role: Role
    out_features: int
    in_features: int
    format: str
    shard: Shard
    copies: int = 1
    shard_ways_max: int | None = None  # KV_HEADS: the number of kv heads

    def __post_init__(self) -> None:
        _require(
            min(self.out_features, self.in_features, self.copies) > 0,
            f"weight {self.name}: sizes must be positive",
        )

    @property
    def parameters(self) -> int:
        """Number of weights, all copies together."""
        return self.copies * self.out_features * self.in_features


@dataclass(frozen=True, slots=True)
class GqaAttention:
    """Multi-head or grouped-query attention, K and V stored per kv head."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.heads % self.kv_heads == 0,
            f"{self.heads} attention heads are not a multiple of {self.kv_heads} kv heads",
        )


@dataclass(frozen=True, slots=True)
class Indexer:
    """The lightning indexer of sparse attention: its own small key cache per token."""

    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class MlaAttention:
    """Multi-head latent attention: one latent of `kv_lora_rank + rope_dim` per token.

    `sparse_top_k` is set when the layer attends to that many selected tokens only (DSA);
    `indexer` is set on the layers that own the indexer which selects them.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    sparse_top_k: int | None = None
    indexer: Indexer | None = None


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Linear attention or a Mamba layer: a fixed state per sequence instead of KV per token.

    `recurrent_elements` and `convolution_elements` count the numbers of one sequence's state over
    all heads; engines keep the recurrent part in FP32 or BF16 and the rest in BF16.
    """

    kind: str
    heads: int
    recurrent_elements: int
    convolution_elements: int


Attention = GqaAttention | MlaAttention | LinearAttention


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated or plain feed-forward block."""

    intermediate_size: int


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """Routed experts with optional shared experts."""

    experts: int
    top_k: int
    intermediate_size: int
    shared_experts: int = 0

    def __post_init__(self) -> None:
        _require(0 < self.top_k <= self.experts, f"top_k {self.top_k} of {self.experts} experts")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One transformer layer: its attention, its MLP (either may be absent) and its weights."""

    attention: Attention | None
    mlp: DenseMlp | MoeMlp | None
    weights: tuple[WeightTensor, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as a checkpoint describes it, layer by layer.

    `outer_weights` are those of no layer (embeddings, head, final norm, vision tower);
    `mtp_layers` are the multi-token-prediction layers that a checkpoint carries and a server
    loads only when it speculates. `native_kv_format` is what `kv: auto` means for it.
    """

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    max_context_tokens: int
    layers: tuple[LayerSpec, ...]
    outer_weights: tuple[WeightTensor, ...]
    mtp_layers: tuple[LayerSpec, ...] = ()
    native_weight_format: str = "bf16"
    verified: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        _require(bool(self.layers), f"{self.name}: a model needs at least one layer")

    @property
    def parameters(self) -> int:
        """Total number of weights without the MTP layers (the convention of model names)."""
        in_layers = sum(w.parameters for layer in self.layers for w in layer.weights)
        return in_layers + sum(w.parameters for w in self.outer_weights)


# --- hardware -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU: memory as the driver reports it, datasheet rates, and where each figure is from."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    dense_flops_per_s: Mapping[str, float] = field(hash=False)  # by compute format: bf16 fp8 fp4..
    nvlink_bytes_per_s: float | None  # one direction, per GPU; None without NVLink
    pcie_bytes_per_s: float  # one direction
    network_bytes_per_s: float  # one direction, per GPU
    gpus_per_node: int
    compute_capability: str
    sources: Mapping[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The path that KV takes from a prefill to a decode instance."""

    kind: str
    bandwidth_bytes_per_s: float  # one direction, per GPU of the sending instance
    setup_s: float  # before the first byte of every part that is sent
    receiver_bandwidth_bytes_per_s: float | None = None  # per GPU that receives; None: the same
    source: str = "given"


# --- deployment ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How one instance spreads over `tp * pp` GPUs.

    `attention_dp` and `ep` divide `tp` (SGLang's convention: `--tp 8 --dp 8` is eight ranks, each
    with its own requests; vLLM's `-tp 1 -dp 8` is the same layout). `dcp` shares the KV of one
    request among that many of the attention ranks.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "attention_dp", "dcp"):
            _require(getattr(self, name) >= 1, f"{name}: must be at least 1")
        _require(self.tp % self.ep == 0, f"ep {self.ep} does not divide tp {self.tp}")
        _require(
            self.tp % self.attention_dp == 0,
            f"attention_dp {self.attention_dp} does not divide tp {self.tp}",
        )
        _require(
            self.attention_tp % self.dcp == 0,
            f"dcp {self.dcp} does not divide the {self.attention_tp} attention ranks",
        )

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.tp * self.pp

    @property
    def attention_tp(self) -> int:
        """Ranks among which one request's attention heads are split."""
        return self.tp // self.attention_dp


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A serving engine and its version; `mem_fraction` None is the engine's own default."""

    name: str
    version: str
    mem_fraction: float | None = None
    mem_fraction_source: str = "auto"  # auto | given | fitted


@dataclass(frozen=True, slots=True)
class SpeculationSpec:
    """Speculative decoding: a draft guesses `draft_tokens` per step, one pass verifies them.

    `accept_probabilities`: of committing 1, 2, ... draft_tokens + 1 tokens in a step. `draft`: what
    guesses: mtp, eagle3, free (it costs nothing), or model, which `draft_model` then is.
    """

    draft_tokens: int
    accept_probabilities: tuple[float, ...]
    draft: str = "free"
    draft_model: ModelSpec | None = None

    def __post_init__(self) -> None:
        _require(
            len(self.accept_probabilities) == self.draft_tokens + 1,
            f"{len(self.accept_probabilities)} accept probabilities; {self.draft_tokens} draft "
            f"tokens need {self.draft_tokens + 1}",
        )
        _require(
            min(self.accept_probabilities) >= 0 and abs(sum(self.accept_probabilities) - 1) < 1e-6,
            "accept probabilities must not be negative and must sum to 1",
        )
        _require(
            (self.draft == "model") == (self.draft_model is not None),
            f"draft {self.draft!r}: a draft model goes with draft 'model' alone",
        )

    @property
    def query_tokens(self) -> int:
        """Tokens that a decoding request computes in a step."""
        return self.draft_tokens + 1

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per step."""
        return sum(n * p for n, p in enumerate(self.accept_probabilities, start=1))


class Coverage(StrEnum):
    """Where page tags are compared: before a read, or before a write."""

    DECODE = "decode"  # every page that a decode step reads
    PREFIX = "prefix"  # pages that a prompt chunk reads: cached, or of its earlier chunks
    TIER = "tier"  # pages that a load from a lower tier writes
    HANDOFF = "handoff"  # pages that leave a prefill instance, and those they are written to
    WRITER = "writer"  # the generation that whoever writes was given


@dataclass(frozen=True, slots=True)
class IntegritySpec:
    """What watches the KV of a pool: page tags, a canary per token slot, a checksum on the way.

    `tracker`: none; batched, page tags compared with each request's ledger in one check per step;
    canary, a record per token slot whose violations stop the process a step later (SGLang 0.5.23).
    `every_steps`: one decode step in so many is checked. `in_graph`: the check is captured with the
    step. `overlapped`: it runs beside the step, so that a bad step runs once before the abort.
    `handoff_checksum`: what a prefill instance sends is summed there and again on arrival.
    """

    tracker: str = "none"
    every_steps: int = 1
    covers: frozenset[Coverage] = frozenset(Coverage)
    in_graph: bool = True
    overlapped: bool = False
    handoff_checksum: bool = False

    def checks(self, place: Coverage) -> bool:
        """Tell whether page tags are compared there."""
        return self.tracker == "batched" and place in self.covers


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Identical instances that do one job: `prefill`, `decode` or both (`serve`)."""

    role: str
    instances: int
    layout: ParallelLayout
    weights: str  # native, or a format name: the checkpoint the pool loads
    kv_format: str
    page_tokens: int
    chunk_tokens: int  # largest number of prompt tokens in one prefill step
    max_running_requests: int
    speculation: SpeculationSpec | None = None
    integrity: IntegritySpec = IntegritySpec()

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool."""
        return self.instances * self.layout.gpus


# --- work ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the offered load. `output_tokens` counts the first token too.

    `block_ids` name the content of its first blocks of `block_tokens` tokens each: the prompt's
    and, where it is known, the output's after it. An id stands for its block and all before it, so
    two requests that begin with the same ids begin with the same tokens. The last block may be
    filled in part, by the end of the prompt. No ids: nothing is known to be shared.
    """

    id: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    output_limit_tokens: int | None = None  # what the client allows; the scheduler knows only this
    session: int | None = None  # the conversation that it is a turn of
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0

    def __post_init__(self) -> None:
        if self.block_ids and self.block_tokens < 1:
            raise BadInputError(f"request {self.id}: block ids without a size of their blocks")
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise BadInputError(
                f"request {self.id}: {self.input_tokens} input and {self.output_tokens} output "
                "tokens; both must be at least 1"
            )

    @property
    def max_new_tokens(self) -> int:
        """Output tokens that the client allows, never fewer than it gets."""
        return max(self.output_tokens, self.output_limit_tokens or 0)

    @property
    def total_tokens(self) -> int:
        """Tokens whose KV it holds when it ends (the last token's KV is never written)."""
        return self.input_tokens + self.output_tokens - 1


class PromptChunk(NamedTuple):
    """Part of one prompt: its tokens, and those already in the cache before it."""

    new_tokens: int
    past_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine instance runs next: prompt chunks, decoding requests, or both.

    `decode_context_tokens` `[decode requests]`: tokens that each one's attention reads in the first
    of the steps. `decode_context_sum` is their sum, and `decode_context_growth` what it grows by
    from one step to the next (None: one token per request). `query_tokens`: tokens that each
    decoding request computes, one, or one and its draft tokens under speculation. `ranks`: under
    attention-DP, the step of every rank, which together make this one; all ranks step together.
    """

    decode_context_tokens: IntArray
    decode_context_sum: float
    prefill_chunks: tuple[PromptChunk, ...]
    decode_context_growth: float | None = None
    query_tokens: int = 1
    ranks: tuple[Step, ...] = ()

    @property
    def decode_requests(self) -> int:
        """Requests that decode, those included whose token nobody waits for any more."""
        return len(self.decode_context_tokens)


@dataclass(frozen=True, slots=True)
class Objective:
    """One latency objective, such as 95 % of TTFT within 5 s."""

    metric: str  # ttft | tpot | itl | e2e
    quantile: float
    limit_s: float
