"""What guesses the tokens of a speculating server: the layers it loads and those each pass runs.

The first pass of a step runs over the tokens that the target has just verified, each later one over
the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tonnage.sim.domain import (
    BadInputError,
    DenseMlp,
    GqaAttention,
    LayerSpec,
    MlaAttention,
    ModelSpec,
    MoeMlp,
    ParallelLayout,
    Role,
    Shard,
    SpeculationSpec,
    WeightTensor,
)
from tonnage.sim.model.hf_attention import GqaOptions, Weights, gqa_weights, mla_weights, vector
from tonnage.sim.model.hf_mlp import dense_block

DRAFT_KINDS = ("mtp", "eagle3", "free")

# Projections that read what enters the layer; in EAGLE-3 that is embedding and hidden state.
_INPUT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
_EAGLE3_ASSUMPTION = (
    "the EAGLE-3 draft's geometry is assumed, not read: one layer with the target's attention, a "
    "dense MLP of {width:,}, a {inputs:,} -> {hidden:,} input projection and a head of its own "
    "over the whole vocabulary, all BF16"
)


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft: `held` is what it loads beside the target, as a model of its own.

    `passes`: the model that the first, second ... pass of a step runs, with the head that it goes
    through; the last of them runs all later passes too.
    """

    held: ModelSpec
    passes: tuple[ModelSpec, ...]
    assumptions: tuple[str, ...] = ()


def draft_of(model: ModelSpec, speculation: SpeculationSpec | None) -> DraftSpec | None:
    """Return the draft of a pool that serves `model`; None where nothing is loaded or run.

    Raises BadInputError when the model has no such draft.
    """
    if speculation is None or speculation.draft_tokens == 0 or speculation.draft == "free":
        return None
    if speculation.draft == "mtp":
        return _mtp(model)
    if speculation.draft == "eagle3":
        return _eagle3(model)
    assert speculation.draft_model is not None  # SpeculationSpec asks for it
    return DraftSpec(speculation.draft_model, (speculation.draft_model,))


def draft_layout(draft: ModelSpec, layout: ParallelLayout) -> ParallelLayout:
    """Return how a draft is spread: as its target, in one stage, its contexts whole on every rank.

    SGLang replicates a draft's KV over the dcp ranks. A draft without experts has no ep.
    """
    has_experts = any(isinstance(layer.mlp, MoeMlp) for layer in draft.layers)
    return replace(layout, pp=1, dcp=1, ep=layout.ep if has_experts else 1)


def _mtp(model: ModelSpec) -> DraftSpec:
    """Return the checkpoint's MTP layers: embedding and head are the target's, loaded once."""
    if not model.mtp_layers:
        raise BadInputError(
            f"draft: {model.name} carries no MTP layers; use eagle3, free or a draft model's name"
        )
    name = f"{model.name} MTP"
    held = replace(model, name=name, layers=model.mtp_layers, outer_weights=(), mtp_layers=())
    passes = (
        replace(model, name=name, layers=(layer,), mtp_layers=()) for layer in model.mtp_layers
    )
    return DraftSpec(held, tuple(passes))


def _eagle3(model: ModelSpec) -> DraftSpec:
    """Return one dense layer that reads three hidden states of the target and the embedding.

    The projection from the three runs once per step, the rest in every pass (SGLang's
    `llama_eagle3.py`: queries, keys and values read embedding and hidden state side by side). The
    embedding is the target's. Attention of the target's kind is what SGLang's pool sizing takes
    for granted; NVIDIA's drafts for Kimi K2 have it.
    """
    hidden_size, width = model.hidden_size, _mlp_width(model)
    attention = _attention(model)
    mlp, mlp_weights = dense_block(hidden_size, width)
    projections = _doubled(_projections(hidden_size, attention))
    layer = LayerSpec(attention, mlp, (*projections, *mlp_weights))
    entry = WeightTensor(
        "fc", Role.DENSE_MLP, hidden_size, 3 * hidden_size, "bf16", Shard.REPLICATED
    )
    head = WeightTensor("lm_head", Role.HEAD, model.vocab_size, hidden_size, "bf16", Shard.VOCAB)
    later = replace(
        model,
        name=f"{model.name} EAGLE-3",
        layers=(layer,),
        outer_weights=(vector("norm", hidden_size), head),
        mtp_layers=(),
        native_weight_format="bf16",
        verified=False,
        source="assumed",
    )
    first = replace(later, layers=(replace(layer, weights=(entry, *layer.weights)),))
    assumed = _EAGLE3_ASSUMPTION.format(width=width, inputs=3 * hidden_size, hidden=hidden_size)
    return DraftSpec(first, (first, later), (assumed,))


def _attention(model: ModelSpec) -> GqaAttention | MlaAttention:
    """Return the attention of the target's last layer that has some, without window or indexer."""
    for layer in reversed(model.layers):
        if isinstance(layer.attention, GqaAttention):
            return replace(layer.attention, window_tokens=None)
        if isinstance(layer.attention, MlaAttention):
            return replace(layer.attention, sparse_top_k=None, indexer=None)
    raise BadInputError(
        f"draft: eagle3 takes the attention of its target, and {model.name} has none; "
        "name the draft's own model"
    )


def _mlp_width(model: ModelSpec) -> int:
    """Return the width of the target's dense MLPs, or of the experts that a token passes."""
    mlps = {layer.mlp for layer in model.layers}
    dense = [mlp.intermediate_size for mlp in mlps if isinstance(mlp, DenseMlp)]
    routed = [mlp.top_k * mlp.intermediate_size for mlp in mlps if isinstance(mlp, MoeMlp)]
    if not dense and not routed:
        raise BadInputError(
            f"draft: eagle3 takes the MLP width of its target; {model.name} has none"
        )
    return max(dense or routed)


def _projections(hidden_size: int, attention: GqaAttention | MlaAttention) -> Weights:
    if isinstance(attention, MlaAttention):
        return mla_weights(hidden_size, attention)
    return gqa_weights(hidden_size, attention, GqaOptions(norm_elements=2 * hidden_size))


def _doubled(weights: Weights) -> Weights:
    """Return the projections with twice as many inputs where they read what enters the layer."""
    return tuple(
        replace(tensor, in_features=2 * tensor.in_features)
        if tensor.name.endswith(_INPUT_PROJECTIONS)
        else tensor
        for tensor in weights
    )
