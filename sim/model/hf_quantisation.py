"""Which stored format each weight of a checkpoint has, from its quantisation config.

Read are `quantization_config` of config.json (fp8, mxfp4, awq, gptq, compressed-tensors, modelopt)
and modelopt's hf_quant_config.json. A rule names modules by their path, by a glob or by a regular
expression; paths are compared without the leading `model`, `language_model` and `backbone`, which
differ between a checkpoint and its quantised releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tonnage.sim.domain import LayerSpec, Role, WeightTensor
from tonnage.sim.model.config_fields import ConfigFields
from tonnage.sim.model.formats import FORMATS

LINEAR_ROLES = frozenset(
    {Role.ATTENTION, Role.INDEXER, Role.DENSE_MLP, Role.SHARED_EXPERT, Role.ROUTED_EXPERT}
)
# Projections that published quantised releases leave in the checkpoint's own precision: DeepSeek
# and GLM (eh_proj, the indexer's head weights), Qwen3.5 (the delta rule's a and b, the MTP entry).
KEPT_PROJECTIONS = (
    "eh_proj",
    "indexer.weights_proj",
    "linear_attn.in_proj_a",
    "linear_attn.in_proj_b",
    "mtp.fc",
)

_MODELOPT_FORMATS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "FP8_PB_WO": "fp8_block",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4_w4a16",
    "W4A16_AWQ": "int4_g128",
    "W4A8_AWQ": "int4_g128",
    "INT8": "int8",
    "MXFP4": "mxfp4",
}
_COMPRESSED_TENSORS_FP8 = {"tensor": "fp8", "channel": "fp8_channel", "block": "fp8_block"}
_OUTER_NAMES = ("model", "language_model", "backbone")


def canonical_path(path: str) -> str:
    """Return a module path without the leading names that differ between releases."""
    parts = path.split(".")
    while len(parts) > 1 and parts[0] in _OUTER_NAMES:
        parts.pop(0)
    # GLM's lists spell `indexer.weights_proj` so, after a textual removal of ".weight".
    return ".".join(parts).replace("indexers_proj", "indexer.weights_proj")


class PathMatcher:
    """Tell whether a module path is named by any of a list of paths, globs and expressions."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Sort the entries: plain paths into a set, globs and expressions into one pattern."""
        self._plain: set[str] = set()
        patterns = []
        for entry in entries:
            if entry.startswith("re:"):
                patterns.append(rf"(?:model\.)?(?:{entry.removeprefix('re:')})")
            elif "*" in entry:
                glob = re.escape(canonical_path(entry)).replace(r"\*", ".*")
                patterns.append(rf"{glob}(?:\..*)?$")
            else:
                self._plain.add(canonical_path(entry))
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def matches(self, path: str) -> bool:
        """Return whether the path, or any module around or within its end, is named."""
        parts = path.split(".")
        count = len(parts)
        if self._plain and any(
            ".".join(parts[start:stop]) in self._plain
            for start in range(count)
            for stop in range(start + 1, count + 1)
        ):
            return True
        return self._pattern is not None and self._pattern.match(path) is not None


@dataclass(frozen=True, slots=True)
class QuantisationRules:
    """The stored format of every module of a checkpoint.

    `named` maps single modules, `groups` lists of modules, `default` all other linear modules of
    the layers with a role in `default_roles`; `excluded` modules keep `base` whatever applies.
    """

    base: str = "bf16"
    default: str | None = None
    default_roles: frozenset[Role] = LINEAR_ROLES
    excluded: PathMatcher = field(default_factory=PathMatcher)
    named: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[tuple[PathMatcher, str], ...] = ()

    def applied(self, tensor: WeightTensor, root: str = "") -> WeightTensor:
        """Return the tensor in the format that it is stored in; `root` is its layer's path."""
        if tensor.role in (Role.NORM, Role.VISION) or tensor.format != "bf16":
            return tensor
        path = f"{root}.{tensor.name}" if root else tensor.name
        if tensor.role is Role.ROUTED_EXPERT:
            path = path.replace(".experts.", ".experts.0.")
        stored = self._stored_format(canonical_path(path), tensor)
        return replace(tensor, format=stored or self.base)

    def applied_to_layer(self, layer: LayerSpec, root: str) -> LayerSpec:
        """Return the layer with every weight in the format that it is stored in."""
        return replace(layer, weights=tuple(self.applied(w, root) for w in layer.weights))

    def _stored_format(self, path: str, tensor: WeightTensor) -> str | None:
        if self.excluded.matches(path):
            return None
        for module in (path, path.split(".experts.0.")[0] + ".experts"):
            if module in self.named:
                return self.named[module]
        for matcher, stored in self.groups:
            if matcher.matches(path):
                return stored
        if tensor.role in self.default_roles and not tensor.name.endswith(KEPT_PROJECTIONS):
            return self.default
        return None


def read_rules(quantisation: ConfigFields | None, base: str = "bf16") -> QuantisationRules:
    """Return the rules of a `quantization_config` or hf_quant_config.json; None is unquantised."""
    if quantisation is None:
        return QuantisationRules(base)
    inner = quantisation.section("quantization") or quantisation
    method = inner.text("quant_method")
    if inner.get("quant_algo") is not None or method == "modelopt":
        return _modelopt_rules(inner, base)
    readers = {
        "fp8": _fp8_rules,
        "mxfp4": _mxfp4_rules,
        "awq": _awq_rules,
        "gptq": _gptq_rules,
        "compressed-tensors": _compressed_tensors_rules,
    }
    if method is None:
        raise inner.refuse("quant_method", "is missing")
    if method not in readers:
        known = ", ".join([*readers, "modelopt"])
        raise inner.refuse("quant_method", f"{method!r} is not one tonnage knows; known: {known}")
    return readers[method](inner, base)


def _excluded(fields: ConfigFields) -> PathMatcher:
    return PathMatcher(
        fields.texts("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    )


def _fp8_rules(fields: ConfigFields, base: str) -> QuantisationRules:
    block = fields.items("weight_block_size")
    if block is not None and list(block) != [128, 128]:
        raise fields.refuse("weight_block_size", f"must be [128, 128], not {list(block)}")
    return QuantisationRules(base, "fp8_block" if block else "fp8", excluded=_excluded(fields))


def _mxfp4_rules(fields: ConfigFields, base: str) -> QuantisationRules:
    # transformers' mxfp4 converts the expert modules only.
    experts = frozenset({Role.ROUTED_EXPERT})
    return QuantisationRules(base, "mxfp4", experts, _excluded(fields))


def _awq_rules(fields: ConfigFields, base: str) -> QuantisationRules:
    return _int4_rules(fields, base, with_zero_points=fields.flag("zero_point", True))


def _gptq_rules(fields: ConfigFields, base: str) -> QuantisationRules:
    # Its files hold packed zero points even where the quantisation is symmetric.
    return _int4_rules(fields, base, with_zero_points=True)


def _int4_rules(fields: ConfigFields, base: str, with_zero_points: bool) -> QuantisationRules:
    if fields.integer("bits") != 4:
        raise fields.refuse("bits", f"must be 4, not {fields.integer('bits')}")
    stored = _int4_format(fields, fields.integer("group_size"), with_zero_points)
    return QuantisationRules(base, stored, excluded=_excluded(fields))


def _int4_format(fields: ConfigFields, group: int, with_zero_points: bool) -> str:
    stored = f"int4_g{group}" + ("_zp" if with_zero_points else "")
    if stored not in FORMATS:
        raise fields.refuse("group_size", f"must be 32, 64 or 128, not {group}")
    return stored


def _modelopt_rules(fields: ConfigFields, base: str) -> QuantisationRules:
    excluded = _excluded(fields)
    algorithm = fields.text("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = fields.section("quantized_layers")
        if layers is None:
            raise fields.refuse("quantized_layers", "is missing")
        named = {}
        for path in layers.values:
            layer = layers.section(path)
            named[canonical_path(path)] = _modelopt_format(layer or layers)
        return QuantisationRules(base, excluded=excluded, named=named)
    return QuantisationRules(base, _modelopt_format(fields), excluded=excluded)


def _modelopt_format(fields: ConfigFields) -> str:
    algorithm = fields.text("quant_algo")
    if algorithm is None:
        raise fields.refuse("quant_algo", "is missing")
    if algorithm not in _MODELOPT_FORMATS:
        known = ", ".join(_MODELOPT_FORMATS)
        raise fields.refuse("quant_algo", f"{algorithm!r} is not one tonnage knows; known: {known}")
    return _MODELOPT_FORMATS[algorithm]


def _compressed_tensors_rules(fields: ConfigFields, base: str) -> QuantisationRules:
    groups = fields.section("config_groups")
    if groups is None:
        raise fields.refuse("config_groups", "is missing")
    default, targeted = None, []
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            continue
        stored = _compressed_tensors_format(group)
        targets = group.texts("targets") or ("Linear",)
        if "Linear" in targets:
            default = stored
        else:
            targeted.append((PathMatcher(targets), stored))
    return QuantisationRules(base, default, excluded=_excluded(fields), groups=tuple(targeted))


def _compressed_tensors_format(group: ConfigFields) -> str:
    weights = group.section("weights")
    if weights is None:
        raise group.refuse("weights", "is missing")
    bits, kind = weights.integer("num_bits"), weights.text("type") or "int"
    strategy, size = weights.text("strategy") or "", weights.optional_integer("group_size")
    if (kind, bits) == ("int", 4) and size:
        return _int4_format(weights, size, not weights.flag("symmetric", True))
    if (kind, bits) == ("int", 8) and strategy == "channel":
        return "int8"
    if (kind, bits) == ("float", 8) and strategy in _COMPRESSED_TENSORS_FP8:
        return _COMPRESSED_TENSORS_FP8[strategy]
    if (kind, bits) == ("float", 4) and size == 32:
        return "mxfp4"
    if (kind, bits) == ("float", 4) and size == 16:
        return "nvfp4" if group.get("input_activations") else "nvfp4_w4a16"
    described = f"{bits}-bit {kind}, strategy {strategy!r}, group_size {size}"
    raise group.refuse("weights", f"has a format that tonnage does not know: {described}")
