"""Reading a config: geometry, quantisation rules and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.sim.domain import (
    BadInputError,
    GqaAttention,
    LinearAttention,
    ModelSpec,
    MoeMlp,
    Role,
    Shard,
    WeightTensor,
)
from tonnage.sim.model.hf_config import model_from_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 11,
    "first_k_dense_replace": 2,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def read(config: dict[str, Any], quantisation: dict[str, Any] | None = None) -> ModelSpec:
    return model_from_config(config, name="tiny", source="test", quantisation=quantisation)


def weights(model: ModelSpec, layer: int = 0) -> dict[str, WeightTensor]:
    return {weight.name: weight for weight in model.layers[layer].weights}


def formats(model: ModelSpec, layer: int = 0) -> dict[str, str]:
    return {name: weight.format for name, weight in weights(model, layer).items()}


def mtp_formats(model: ModelSpec) -> dict[str, str]:
    return {weight.name: weight.format for weight in model.mtp_layers[0].weights}


# --- geometry ------------------------------------------------------------------------------------


def test_a_grouped_query_layer_lists_its_projections() -> None:
    model = read(LLAMA)
    named = weights(model)
    assert model.layers[0].attention == GqaAttention(8, 2, 64, 64)
    assert (named["self_attn.q_proj"].out_features, named["self_attn.q_proj"].in_features) == (
        512,
        512,
    )
    key = named["self_attn.k_proj"]
    assert (key.out_features, key.shard, key.shard_ways_max) == (128, Shard.KV_HEADS, 2)
    attention = 512 * (512 + 128 + 128 + 512)
    expected = 4 * (attention + 3 * 512 * 1024 + 2 * 512) + 2 * 1000 * 512 + 512
    assert model.parameters == expected


def test_a_tied_head_is_counted_once() -> None:
    tied = read(LLAMA | {"tie_word_embeddings": True})
    assert tied.parameters == read(LLAMA).parameters - 1000 * 512
    assert Role.HEAD not in {weight.role for weight in tied.outer_weights}


def test_latent_attention_replicates_its_down_projections() -> None:
    named = weights(read(DEEPSEEK))
    shards = {name.split(".")[-1]: weight.shard for name, weight in named.items()}
    assert shards["q_a_proj"] == shards["kv_a_proj_with_mqa"] == shards["wk"] == Shard.REPLICATED
    assert shards["q_b_proj"] == shards["kv_b_proj"] == shards["o_proj"] == Shard.ATTENTION
    assert named["self_attn.kv_a_proj_with_mqa"].out_features == 64 + 16
    assert named["self_attn.indexer.wq_b"].role is Role.INDEXER


def test_latent_attention_without_a_query_rank_projects_directly() -> None:
    named = weights(read(DEEPSEEK | {"q_lora_rank": None}))
    assert named["self_attn.q_proj"].out_features == 8 * (32 + 16)
    assert "self_attn.q_a_proj" not in named


def test_dense_layers_come_first_and_the_mtp_layer_is_apart() -> None:
    model = read(DEEPSEEK)
    assert [isinstance(layer.mlp, MoeMlp) for layer in model.layers] == [False] * 2 + [True] * 9
    assert len(model.mtp_layers) == 1
    assert "eh_proj" in mtp_formats(model)
    assert model.parameters == read(DEEPSEEK | {"num_nextn_predict_layers": 0}).parameters


def test_the_index_frequency_says_which_layers_own_an_indexer() -> None:
    model = read(DEEPSEEK | {"index_topk_freq": 4, "index_skip_topk_offset": 3})
    owners = [
        index
        for index, layer in enumerate(model.layers)
        if getattr(layer.attention, "indexer", None) is not None
    ]
    assert owners == [0, 1, 2, 6, 10]
    assert all(getattr(layer.attention, "sparse_top_k", 0) == 64 for layer in model.layers)


def test_equal_layers_are_one_object() -> None:
    assert len({id(layer) for layer in read(DEEPSEEK).layers}) == 2


def test_a_mamba_layer_has_a_state_and_no_mlp() -> None:
    model = read(
        {
            "architectures": ["NemotronHForCausalLM"],
            "hidden_size": 512,
            "intermediate_size": 1024,
            "hybrid_override_pattern": "M-*-",
            "mamba_num_heads": 16,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 1000,
            "max_position_embeddings": 4096,
        }
    )
    inner, mixed = 16 * 64, 16 * 64 + 2 * 8 * 128
    assert model.layers[0].attention == LinearAttention("mamba2", 16, inner * 128, mixed * 3)
    assert [layer.mlp is None for layer in model.layers] == [True, False, True, False]
    assert weights(model)["mixer.in_proj"].out_features == inner + mixed + 16


# --- quantisation --------------------------------------------------------------------------------


def test_fp8_blocks_cover_the_linears_but_not_router_head_and_norms() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = read(DEEPSEEK | {"quantization_config": config})
    stored = formats(model, layer=5)
    assert stored["mlp.experts.gate_proj"] == stored["self_attn.o_proj"] == "fp8_block"
    assert stored["self_attn.indexer.wq_b"] == stored["mlp.shared_experts.up_proj"] == "fp8_block"
    assert stored["mlp.gate"] == stored["self_attn.indexer.weights_proj"] == "bf16"
    assert mtp_formats(model)["mlp.experts.gate_proj"] == "fp8_block"
    assert mtp_formats(model)["eh_proj"] == "bf16"
    assert {weight.format for weight in model.outer_weights} == {"bf16"}
    assert model.native_weight_format == "fp8_block"


def test_compressed_tensors_ignore_by_expression() -> None:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
    }
    model = read(DEEPSEEK | {"quantization_config": config})
    assert formats(model)["mlp.gate_proj"] == "bf16"
    assert formats(model, 5)["mlp.experts.gate_proj"] == "int4_g32"
    assert formats(model, 5)["mlp.shared_experts.gate_proj"] == "int4_g32"
    assert formats(model, 5)["self_attn.q_b_proj"] == "bf16"


@pytest.mark.parametrize(
    ("weights_scheme", "stored"),
    [
        ({"num_bits": 4, "type": "int", "group_size": 128, "symmetric": False}, "int4_g128_zp"),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, "int8"),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8_channel"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8"),
        ({"num_bits": 8, "type": "float", "strategy": "block"}, "fp8_block"),
        ({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4_w4a16"),
        ({"num_bits": 4, "type": "float", "group_size": 32}, "mxfp4"),
    ],
)
def test_compressed_tensors_schemes(weights_scheme: dict[str, Any], stored: str) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights_scheme}},
    }
    assert formats(read(LLAMA | {"quantization_config": config}))["mlp.up_proj"] == stored


def test_awq_and_gptq_files_hold_zero_points() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    assert formats(read(LLAMA | {"quantization_config": awq}))["mlp.up_proj"] == "int4_g128_zp"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
    assert formats(read(LLAMA | {"quantization_config": gptq}))["mlp.up_proj"] == "int4_g64_zp"


def test_modelopt_excludes_by_glob() -> None:
    excluded = ["lm_head", "model.layers.1*", "model.layers.*.self_attn*", "model.layers.11*"]
    quantisation = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": excluded}}
    model = read(DEEPSEEK, quantisation)
    assert formats(model)["mlp.gate_proj"] == "nvfp4"
    assert formats(model)["self_attn.o_proj"] == "bf16"
    assert set(formats(model, 1).values()) == {"bf16"}
    assert formats(model, 2)["mlp.experts.gate_proj"] == "nvfp4"
    assert set(formats(model, 10).values()) == {"bf16"}
    assert set(mtp_formats(model).values()) == {"bf16"}  # the MTP layer is layer 11


def test_modelopt_mixed_precision_names_each_module() -> None:
    quantisation = {
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "model.layers.3.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.4.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"},
                "model.layers.3.self_attn.o_proj": {"quant_algo": "FP8"},
            },
        }
    }
    model = read(DEEPSEEK, quantisation)
    assert formats(model, 3)["mlp.experts.down_proj"] == "nvfp4"
    assert formats(model, 3)["self_attn.o_proj"] == "fp8"
    assert formats(model, 4)["mlp.experts.up_proj"] == "nvfp4"
    assert formats(model, 4)["mlp.experts.down_proj"] == "bf16"
    assert {w.role: w.format for w in model.outer_weights}[Role.HEAD] == "nvfp4_w4a16"


def test_an_unquantised_checkpoint_keeps_its_own_type() -> None:
    model = read(LLAMA | {"torch_dtype": "float16"})
    assert formats(model)["mlp.up_proj"] == "fp16"
    assert model.native_weight_format == "fp16"


# --- refusals ------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_refused_by_name() -> None:
    message = "tiny: architecture 'FooForCausalLM' is not one tonnage knows; known: .*Llama"
    with pytest.raises(BadInputError, match=message):
        read(LLAMA | {"architectures": ["FooForCausalLM"]})


def test_a_known_but_unmodelled_architecture_says_why() -> None:
    with pytest.raises(BadInputError, match=r"DeepseekV4ForCausalLM.*KV cache is compressed"):
        read(LLAMA | {"architectures": ["DeepseekV4ForCausalLM"]})


@pytest.mark.parametrize("name", sorted(set(LLAMA) - {"architectures", "num_key_value_heads"}))
def test_a_missing_field_is_named(name: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(BadInputError, match=f"tiny: field '{name}' is missing"):
        read(config)


@pytest.mark.parametrize("name", ["kv_lora_rank", "index_n_heads", "n_routed_experts"])
def test_a_missing_field_of_latent_attention_is_named(name: str) -> None:
    config = {key: value for key, value in DEEPSEEK.items() if key != name}
    with pytest.raises(BadInputError, match=f"tiny: field '{name}' is missing"):
        read(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "512"}, "field 'hidden_size' must be a positive integer, not '512'"),
        ({"hidden_size": -1}, "field 'hidden_size' must be a positive integer"),
        ({"num_hidden_layers": 0}, "field 'num_hidden_layers' must be a positive integer, not 0"),
        ({"num_key_value_heads": 3}, "tiny: 8 attention heads are not a multiple of 3"),
        ({"num_attention_heads": 7}, "field 'num_attention_heads' 7 does not divide"),
        ({"tie_word_embeddings": "no"}, "field 'tie_word_embeddings' must be true or false"),
        ({"torch_dtype": "int3"}, "field 'dtype' 'int3' is not one of bfloat16"),
        ({"quantization_config": {"quant_method": "magic"}}, "'magic' is not one tonnage knows"),
        ({"quantization_config": {}}, "quantization_config: field 'quant_method' is missing"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "field 'weight_block_size' must be",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 3, "group_size": 128}},
            "field 'bits' must be 4, not 3",
        ),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read(LLAMA | change)


def test_a_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(BadInputError, match="field 'indexer_types' has 2 items for 11 layers"):
        read(DEEPSEEK | {"indexer_types": ["full", "shared"]})


def test_an_unknown_modelopt_algorithm_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"hf_quant_config: .*'NF4' is not one tonnage knows"):
        read(LLAMA, {"quantization": {"quant_algo": "NF4"}})
