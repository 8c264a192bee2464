"""Bytes of KV cache that a request takes, exact with windows, states and pages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from tonnage.sim.domain import (
    Attention,
    BadInputError,
    FloatArray,
    GqaAttention,
    LayerSpec,
    LinearAttention,
    MlaAttention,
    ModelSpec,
    ParallelLayout,
)
from tonnage.sim.model.formats import kv_element_bytes

# FlashMLA's sparse FP8 latent keeps one FP32 scale per 128 latent elements and the rope part in
# BF16: 512 + 16 + 128 = 656 B. The indexer keeps FP8 keys with one FP32 scale per token.
# Source: SGLang 0.5.23 pool_configurator, vLLM 0.33 fp8_ds_mla.
_SPARSE_SCALE_GROUP = 128
_SCALE_BYTES = 4
_ROPE_BYTES_PER_ELEMENT = 2
# SGLang 0.5.23 --mamba-ssm-dtype default; the convolution part is kept in BF16.
_RECURRENT_BYTES_PER_ELEMENT = 4
_CONVOLUTION_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one GPU stores of a request, for the layers of one pipeline stage.

    `shared_bytes_per_token`: layers that keep every token, shared among the `dcp` ranks.
    `whole_bytes_per_token`: what context parallelism does not share (the indexer's keys).
    `windows`: (window tokens, bytes per token) of the sliding layers. `state_bytes`: linear layers.
    """

    shared_bytes_per_token: float
    whole_bytes_per_token: float
    windows: tuple[tuple[int, float], ...]
    state_bytes: float
    dcp: int = 1

    @property
    def growing_bytes_per_token(self) -> float:
        """Bytes that one more token of a long context takes on this GPU."""
        return self.shared_bytes_per_token / self.dcp + self.whole_bytes_per_token

    @property
    def billed_bytes_per_token(self) -> float:
        """The same, sliding layers counted as if they kept every token."""
        return self.growing_bytes_per_token + sum(size for _, size in self.windows)

    def request_bytes(self, tokens: ArrayLike, page_tokens: int = 1) -> FloatArray:
        """Return bytes per GPU of requests that hold `tokens`, in whole pages; same shape."""
        held = np.asarray(tokens, dtype=np.int64)
        local_tokens = -(-held // (self.dcp * page_tokens)) * page_tokens
        total = local_tokens * self.shared_bytes_per_token
        total = total + local_tokens * self.dcp * self.whole_bytes_per_token
        page_aligned = -(-held // page_tokens) * page_tokens
        for window_tokens, bytes_per_token in self.windows:
            # A window that does not start on a page boundary reaches into one page more.
            most = (-(-(window_tokens - 1) // page_tokens) + 1) * page_tokens
            total = total + np.minimum(page_aligned, most) * bytes_per_token
        return np.asarray(total + self.state_bytes * (held > 0), dtype=np.float64)


def kv_shape(layers: Sequence[LayerSpec], layout: ParallelLayout, kv_format: str) -> KvShape:
    """Return what one GPU of a stage with these layers stores."""
    shared = whole = state = 0.0
    window_bytes: defaultdict[int, float] = defaultdict(float)
    for attention, count in Counter(layer.attention for layer in layers).items():
        if attention is None:
            continue
        if isinstance(attention, LinearAttention):
            state += count * state_bytes(attention, layout)
            continue
        token_bytes = count * layer_bytes_per_token(attention, layout, kv_format)
        if isinstance(attention, GqaAttention) and attention.window_tokens is not None:
            window_bytes[attention.window_tokens] += token_bytes
            continue
        shared += token_bytes
        whole += count * indexer_bytes_per_token(attention)
    return KvShape(shared, whole, tuple(sorted(window_bytes.items())), state, layout.dcp)


def layer_bytes_per_token(
    attention: GqaAttention | MlaAttention, layout: ParallelLayout, kv_format: str
) -> float:
    """Return bytes per token, layer and GPU before context parallelism, without the indexer."""
    element_bytes = _element_bytes(kv_format)
    if isinstance(attention, GqaAttention):
        heads = kv_heads_per_gpu(attention, layout)
        return heads * (attention.head_dim + attention.value_dim) * element_bytes
    # One latent serves all heads, so every attention rank holds all of it.
    if attention.sparse_top_k is None or element_bytes != 1:
        return float((attention.kv_lora_rank + attention.rope_dim) * element_bytes)
    scales_bytes = attention.kv_lora_rank // _SPARSE_SCALE_GROUP * _SCALE_BYTES
    return float(
        attention.kv_lora_rank + scales_bytes + attention.rope_dim * _ROPE_BYTES_PER_ELEMENT
    )


def indexer_bytes_per_token(attention: Attention) -> float:
    """Return bytes per token of the sparse indexer's keys, 0 on layers that own none."""
    if not isinstance(attention, MlaAttention) or attention.indexer is None:
        return 0.0
    return float(attention.indexer.head_dim + _SCALE_BYTES)


def state_bytes(attention: LinearAttention, layout: ParallelLayout) -> float:
    """Return the bytes per sequence, layer and GPU of a linear-attention state."""
    recurrent_bytes = attention.recurrent_elements * _RECURRENT_BYTES_PER_ELEMENT
    convolution_bytes = attention.convolution_elements * _CONVOLUTION_BYTES_PER_ELEMENT
    return (recurrent_bytes + convolution_bytes) / layout.attention_tp


def kv_heads_per_gpu(attention: GqaAttention, layout: ParallelLayout) -> float:
    """Return the kv heads that one GPU holds: at least one, replicated beyond `kv_heads` ranks."""
    return max(1, attention.kv_heads / layout.attention_tp)


def stage_layers(layer_count: int, layout: ParallelLayout, engine: str = "sglang") -> list[range]:
    """Return which layers each pipeline stage holds.

    A remainder goes to the last stages (SGLang 0.5.23), to the last ones but the very last, which
    also holds the head (vLLM), or to the first (TensorRT-LLM `Mapping.pp_layers`).
    """
    if layout.pp > layer_count:
        raise BadInputError(f"pp: {layout.pp} stages are more than the {layer_count} layers")
    counts = [layer_count // layout.pp] * layout.pp
    offset = 2 if engine == "vllm" else 1
    for index in range(layer_count % layout.pp):
        counts[index if engine == "trtllm" else layout.pp - offset - index] += 1
    starts = np.cumsum([0, *counts]).tolist()
    return [range(start, end) for start, end in pairwise(starts)]


def stage_kv_shapes(
    model: ModelSpec,
    layout: ParallelLayout,
    kv_format: str,
    engine: str = "sglang",
    draft_layers_loaded: bool = False,
) -> list[KvShape]:
    """Return what one GPU of each pipeline stage stores; the last one also runs MTP layers."""
    stages = stage_layers(len(model.layers), layout, engine)
    layers = [model.layers[stage.start : stage.stop] for stage in stages]
    if draft_layers_loaded:
        layers[-1] = layers[-1] + model.mtp_layers
    return [kv_shape(stage, layout, kv_format) for stage in layers]


def kv_bytes_per_token(model: ModelSpec, layout: ParallelLayout, kv_format: str) -> float:
    """Return what one more token of a long context takes per GPU, on the fullest stage.

    With the default layout it is the whole model's figure; sliding layers no longer grow.
    """
    shapes = stage_kv_shapes(model, layout, kv_format)
    return max(shape.growing_bytes_per_token for shape in shapes)


def request_kv_bytes(
    model: ModelSpec, layout: ParallelLayout, kv_format: str, tokens: ArrayLike
) -> FloatArray:
    """Return the KV bytes per GPU of requests that hold `tokens`, on the fullest stage."""
    shapes = stage_kv_shapes(model, layout, kv_format)
    return np.asarray(np.max([shape.request_bytes(tokens) for shape in shapes], axis=0))


def _element_bytes(kv_format: str) -> int:
    # vLLM's --dtype float32 makes the cache FP32 too; no engine offers it as a KV format.
    return 4 if kv_format == "fp32" else kv_element_bytes(kv_format)
