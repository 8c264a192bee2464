"""Read a Hugging Face config.json into a `ModelSpec`, weight by weight."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tonnage.sim.domain import BadInputError, LayerSpec, ModelSpec, Role, Shard, WeightTensor
from tonnage.sim.model.architectures import architecture_reader
from tonnage.sim.model.config_fields import ConfigFields
from tonnage.sim.model.formats import UNQUANTISED_FORMATS
from tonnage.sim.model.hf_attention import vector
from tonnage.sim.model.hf_quantisation import QuantisationRules, read_rules
from tonnage.sim.model.skeleton import ModelFields, Skeleton

_STORED_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def read_model(path: Path) -> ModelSpec:
    """Read a config.json, a folder that holds one, or a file of the model catalogue.

    A modelopt hf_quant_config.json beside it (`X_hf_quant_config.json` beside `X_config.json`)
    says how the weights are stored. A catalogue file names itself under the key `tonnage`.
    """
    if path.is_dir():
        path = path / "config.json"
    whole = ConfigFields(_read_json(path), str(path))
    beside = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
    has_sibling = path.name.endswith("config.json") and beside.is_file()
    quantisation = ConfigFields(_read_json(beside), str(beside)) if has_sibling else None
    entry = whole.section("tonnage") or ConfigFields({}, str(path))
    name = path.parent.name if path.name == "config.json" else path.stem.removesuffix("_config")
    return replace(
        _read_spec(whole, quantisation),
        name=name,
        source=entry.text("source") or path.name,
        verified=entry.flag("verified", True),
    )


def _read_json(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        raise BadInputError(f"{path}: no such file; give a config.json or a folder that holds one")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadInputError(f"{path}: must hold a JSON object, not {type(config).__name__}")
    return config


def model_from_config(
    config: Mapping[str, object],
    *,
    name: str,
    source: str,
    quantisation: Mapping[str, object] | None = None,
    verified: bool = True,
) -> ModelSpec:
    """Return the model that a config describes; `quantisation` is its hf_quant_config, if any."""
    fields = None
    if quantisation is not None:
        fields = ConfigFields(quantisation, f"{name}: hf_quant_config")
    model = _read_spec(ConfigFields(config, name), fields)
    return replace(model, name=name, source=source, verified=verified)


def _read_spec(whole: ConfigFields, quantisation: ConfigFields | None) -> ModelSpec:
    """Return the model under the name of its file; every refusal names that file."""
    try:
        return _spec(whole, quantisation)
    except BadInputError as error:
        if whole.where in str(error) or (quantisation and quantisation.where in str(error)):
            raise
        raise BadInputError(f"{whole.where}: {error}") from error


def _spec(whole: ConfigFields, quantisation: ConfigFields | None) -> ModelSpec:
    architectures = whole.texts("architectures")
    if not architectures:
        raise whole.refuse("architectures", "is missing")
    reader = architecture_reader(architectures[0], whole.where)
    section = whole.section("text_config")
    text = whole if section is None else replace(section, fallback=whole.values)
    model = ModelFields(text, whole)
    skeleton = reader(model)
    rules = _rules(text, quantisation)
    layers = _stored(skeleton.layers, _layer_roots(skeleton), rules)
    return ModelSpec(
        name=whole.where,
        architecture=architectures[0],
        hidden_size=model.hidden_size,
        vocab_size=text.integer("vocab_size"),
        max_context_tokens=text.integer("max_position_embeddings"),
        layers=layers,
        outer_weights=(*_outer_weights(model, rules), *skeleton.vision),
        mtp_layers=_stored(skeleton.mtp_layers, skeleton.mtp_roots, rules),
        native_weight_format=dominant_format(layers),
    )


def _rules(text: ConfigFields, quantisation: ConfigFields | None) -> QuantisationRules:
    stored_type = text.text("dtype", "torch_dtype") or "bfloat16"
    if stored_type not in _STORED_TYPES:
        known = ", ".join(_STORED_TYPES)
        raise text.refuse("dtype", f"{stored_type!r} is not one of {known}")
    fields = quantisation or text.section("quantization_config")
    return read_rules(fields, _STORED_TYPES[stored_type])


def _layer_roots(skeleton: Skeleton) -> tuple[str, ...]:
    return tuple(f"layers.{index}" for index in range(len(skeleton.layers)))


def _stored(
    layers: tuple[LayerSpec, ...], roots: tuple[str, ...], rules: QuantisationRules
) -> tuple[LayerSpec, ...]:
    """Return the layers as stored; equal layers are one object, which keeps a model small."""
    distinct: dict[LayerSpec, LayerSpec] = {}
    stored = (rules.applied_to_layer(*pair) for pair in zip(layers, roots, strict=True))
    return tuple(distinct.setdefault(layer, layer) for layer in stored)


def _outer_weights(model: ModelFields, rules: QuantisationRules) -> tuple[WeightTensor, ...]:
    """Return embedding, head and final norm; a tied head is the embedding itself."""
    vocab_size, hidden_size = model.text.integer("vocab_size"), model.hidden_size

    def table(name: str, role: Role) -> WeightTensor:
        return WeightTensor(name, role, vocab_size, hidden_size, "bf16", Shard.VOCAB)

    weights = [table("embed_tokens", Role.EMBEDDING), vector("norm", hidden_size)]
    if not model.text.flag("tie_word_embeddings", False):
        weights.append(table("lm_head", Role.HEAD))
    return tuple(rules.applied(weight) for weight in weights)


def dominant_format(layers: tuple[LayerSpec, ...]) -> str:
    """Return the quantised format with the most weights in it, or that of unquantised layers."""
    parameters: Counter[str] = Counter()
    for layer in layers:
        for tensor in layer.weights:
            if tensor.role not in (Role.NORM, Role.ROUTER):
                parameters[tensor.format] += tensor.parameters
    quantised = [name for name in parameters if name not in UNQUANTISED_FORMATS]
    return max(quantised or parameters, key=lambda name: parameters[name])
