"""The same model in another weight format, by the recipes of published checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tonnage.sim.domain import BadInputError, LayerSpec, ModelSpec, MoeMlp, Role, WeightTensor
from tonnage.sim.model.formats import UNQUANTISED_FORMATS
from tonnage.sim.model.hf_quantisation import KEPT_PROJECTIONS, LINEAR_ROLES

_EXPERTS = frozenset({Role.ROUTED_EXPERT})
_NOTHING: frozenset[Role] = frozenset()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which weights of the layers a release in some format converts; the others are BF16.

    Embeddings, head, norms, routers and vision towers are never converted, nor are the few
    projections in `KEPT_PROJECTIONS`.
    """

    moe_roles: frozenset[Role]
    dense_roles: frozenset[Role] = LINEAR_ROLES
    converts_mtp: bool = True


# FP8: DeepSeek-V3, Kimi-K2 and GLM-5-FP8 convert every linear of a layer.
# INT4: Kimi-K2.5 (compressed-tensors) and the GLM-5.2 W4A16 releases convert routed experts only.
# MXFP4: gpt-oss converts routed experts only.
# NVFP4: NVIDIA's Kimi-K2.6-NVFP4 and GLM-5.2-NVFP4 convert routed experts only and leave the MTP
# layer in BF16 (their hf_quant_config.json).
# Dense models: every linear of a layer, as in the FP8 and W4A16 releases of Llama and Qwen3.
# bf16_lossless: an assumption, the linears of every layer.
RECIPES = {
    "bf16": Recipe(_NOTHING, _NOTHING),
    "bf16_lossless": Recipe(LINEAR_ROLES),
    "fp8": Recipe(LINEAR_ROLES),
    "fp8_channel": Recipe(LINEAR_ROLES),
    "fp8_block": Recipe(LINEAR_ROLES),
    "int8": Recipe(LINEAR_ROLES),
    "int4_g32": Recipe(_EXPERTS),
    "int4_g64": Recipe(_EXPERTS),
    "int4_g128": Recipe(_EXPERTS),
    "mxfp4": Recipe(_EXPERTS),
    "nvfp4": Recipe(_EXPERTS, converts_mtp=False),
}


def with_weights(model: ModelSpec, weights: str) -> ModelSpec:
    """Return the model as a checkpoint in the format `weights` holds it; `native` changes nothing.

    A weight that the recipe leaves alone keeps its unquantised format, or becomes BF16 where the
    native checkpoint quantises it.
    """
    if weights == "native":
        return model
    if weights not in RECIPES:
        valid = ", ".join(["native", *RECIPES])
        raise BadInputError(f"unknown weights {weights!r}; use one of {valid}")
    recipe = RECIPES[weights]
    roles = recipe.moe_roles if is_moe(model) else recipe.dense_roles
    convert = _converter(weights, roles)
    plain = _converter(weights, _NOTHING)
    return replace(
        model,
        layers=_layers(model.layers, convert),
        mtp_layers=_layers(model.mtp_layers, convert if recipe.converts_mtp else plain),
        outer_weights=tuple(plain(tensor) for tensor in model.outer_weights),
        native_weight_format=weights,
    )


def is_moe(model: ModelSpec) -> bool:
    """Return whether any layer has routed experts."""
    return any(isinstance(layer.mlp, MoeMlp) for layer in model.layers)


def _converter(weights: str, roles: frozenset[Role]) -> Callable[[WeightTensor], WeightTensor]:
    def convert(tensor: WeightTensor) -> WeightTensor:
        if tensor.role in roles and not tensor.name.endswith(KEPT_PROJECTIONS):
            return replace(tensor, format=weights)
        if tensor.format in UNQUANTISED_FORMATS:
            return tensor
        return replace(tensor, format="bf16")

    return convert


def _layers(
    layers: tuple[LayerSpec, ...], convert: Callable[[WeightTensor], WeightTensor]
) -> tuple[LayerSpec, ...]:
    """Return the converted layers; equal layers stay one object."""
    converted: dict[LayerSpec, LayerSpec] = {}
    for layer in layers:
        if layer not in converted:
            converted[layer] = replace(layer, weights=tuple(map(convert, layer.weights)))
    return tuple(converted[layer] for layer in layers)
