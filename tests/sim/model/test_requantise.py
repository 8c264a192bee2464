"""The same model in another format: which weights change, and what the checkpoint then weighs."""

from __future__ import annotations

from pathlib import Path

import pytest

import tonnage.scenarios
from tonnage.sim.domain import BadInputError, ModelSpec, Role
from tonnage.sim.model.formats import checkpoint_bytes
from tonnage.sim.model.hf_config import read_model
from tonnage.sim.model.requantise import RECIPES, with_weights

MODELS = Path(tonnage.scenarios.__file__).parent / "models"


def shipped(name: str) -> ModelSpec:
    return read_model(MODELS / f"{name}.json")


def formats_by_role(model: ModelSpec) -> dict[Role, set[str]]:
    found: dict[Role, set[str]] = {}
    for layer in model.layers:
        for weight in layer.weights:
            found.setdefault(weight.role, set()).add(weight.format)
    for weight in model.outer_weights:
        found.setdefault(weight.role, set()).add(weight.format)
    return found


@pytest.mark.parametrize(
    ("name", "weights", "expected_bytes"),
    [
        # facts/serving.md section 1; Kimi-K2.6 with its 0.9 GB vision tower (quoted: 595 GB)
        ("kimi-k2.6", "native", 595e9),
        ("kimi-k2", "int4_g32", 594e9),
        ("kimi-k2", "native", 1029e9),
        ("kimi-k2", "fp8", 1029e9),
        ("kimi-k2", "bf16", 2053e9),
        ("glm-5.2", "native", 755e9),
        ("glm-5.2", "bf16", 1507e9),
        ("glm-5.2", "fp8", 755e9),
        ("glm-5.2", "fp8_block", 755e9),
        ("glm-5.2", "int4_g32", 451e9),
        ("deepseek-v3.2", "native", 685e9),
    ],
)
def test_checkpoint_sizes_of_the_facts(name: str, weights: str, expected_bytes: float) -> None:
    assert checkpoint_bytes(with_weights(shipped(name), weights)) == pytest.approx(
        expected_bytes, rel=0.002
    )


def test_glm_sizes_in_gib_as_they_are_quoted() -> None:
    glm, gib = shipped("glm-5.2"), 2**30
    assert 703 < checkpoint_bytes(glm) / gib < 704.2
    assert checkpoint_bytes(with_weights(glm, "int4_g32")) / gib == pytest.approx(420, abs=0.6)
    assert checkpoint_bytes(shipped("kimi-k2.6")) / gib == pytest.approx(553, rel=0.003)


def test_native_is_the_model_itself() -> None:
    model = shipped("kimi-k2.6")
    assert with_weights(model, "native") is model


@pytest.mark.parametrize(
    ("name", "weights"), [("kimi-k2", "fp8_block"), ("glm-5.2", "fp8_block"), ("qwen3-8b", "bf16")]
)
def test_the_native_format_by_name_changes_no_weight(name: str, weights: str) -> None:
    model = shipped(name)
    again = with_weights(model, weights)
    assert again.layers == model.layers
    assert again.mtp_layers == model.mtp_layers
    assert again.outer_weights == model.outer_weights


def test_the_native_int4_of_kimi_by_name_changes_no_weight() -> None:
    model = shipped("kimi-k2.5")
    assert with_weights(model, "int4_g32").layers == model.layers


def test_four_bit_recipes_convert_only_the_routed_experts_of_a_mixture() -> None:
    for weights in ("int4_g32", "int4_g128", "mxfp4", "nvfp4"):
        found = formats_by_role(with_weights(shipped("glm-5.2"), weights))
        assert found.pop(Role.ROUTED_EXPERT) == {weights}
        assert found.pop(Role.ROUTER) == {"fp32"}
        assert set.union(*found.values()) == {"bf16"}


def test_four_bit_recipes_convert_the_mtp_experts_except_nvidia_s() -> None:
    def expert_format(weights: str) -> str:
        layer = with_weights(shipped("glm-5.2"), weights).mtp_layers[0]
        return next(w.format for w in layer.weights if w.role is Role.ROUTED_EXPERT)

    assert expert_format("int4_g32") == "int4_g32"
    assert expert_format("nvfp4") == "bf16"


def test_dense_models_convert_every_linear_of_a_layer() -> None:
    found = formats_by_role(with_weights(shipped("llama-3.1-70b"), "int4_g128"))
    assert found[Role.ATTENTION] == found[Role.DENSE_MLP] == {"int4_g128"}
    assert found[Role.EMBEDDING] == found[Role.HEAD] == found[Role.NORM] == {"bf16"}


def test_fp8_converts_attention_indexer_and_experts_but_not_the_head() -> None:
    found = formats_by_role(with_weights(shipped("deepseek-v3.2"), "fp8"))
    assert found[Role.ATTENTION] == found[Role.SHARED_EXPERT] == found[Role.DENSE_MLP] == {"fp8"}
    assert found[Role.INDEXER] == {"fp8", "bf16"}  # the head weights stay as they are
    assert found[Role.ROUTER] == found[Role.HEAD] == {"bf16"}


@pytest.mark.parametrize("weights", sorted(RECIPES))
def test_a_recipe_keeps_parameters_and_is_its_own_fixed_point(weights: str) -> None:
    model = shipped("kimi-k2.6")
    changed = with_weights(model, weights)
    assert changed.parameters == model.parameters
    assert changed.native_weight_format == weights
    assert with_weights(changed, weights) == changed
    assert with_weights(with_weights(model, "bf16"), weights) == changed


def test_unknown_weights_are_refused_with_the_valid_names() -> None:
    with pytest.raises(BadInputError, match="unknown weights 'int3'; use one of native, bf16"):
        with_weights(shipped("qwen3-8b"), "int3")
