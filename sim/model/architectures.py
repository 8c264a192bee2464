"""The architectures that tonnage knows, by the name in a config's `architectures` field."""

from __future__ import annotations

from tonnage.sim.domain import BadInputError
from tonnage.sim.model.dense_models import (
    read_llama,
    read_mimo,
    read_mistral,
    read_qwen2,
    read_qwen3,
)
from tonnage.sim.model.hybrid_models import read_gemma4, read_nemotron_h, read_qwen3_5
from tonnage.sim.model.latent_models import read_deepseek
from tonnage.sim.model.moe_models import (
    read_gpt_oss,
    read_llama4,
    read_mimo_v2,
    read_minimax_m2,
    read_mixtral,
    read_qwen3_moe,
)
from tonnage.sim.model.skeleton import SkeletonReader

ARCHITECTURES: dict[str, SkeletonReader] = {
    "DeepseekV2ForCausalLM": read_deepseek,
    "DeepseekV32ForCausalLM": read_deepseek,
    "DeepseekV3ForCausalLM": read_deepseek,
    "Gemma4ForConditionalGeneration": read_gemma4,
    "GlmMoeDsaForCausalLM": read_deepseek,
    "GptOssForCausalLM": read_gpt_oss,
    "KimiK25ForConditionalGeneration": read_deepseek,
    "Llama4ForConditionalGeneration": read_llama4,
    "LlamaForCausalLM": read_llama,
    "MiMoForCausalLM": read_mimo,
    "MiMoV2FlashForCausalLM": read_mimo_v2,
    "MiniMaxM2ForCausalLM": read_minimax_m2,
    "Ministral3ForCausalLM": read_mistral,
    "MistralForCausalLM": read_mistral,
    "MixtralForCausalLM": read_mixtral,
    "NemotronHForCausalLM": read_nemotron_h,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Qwen3VLForConditionalGeneration": read_qwen3,
    "Qwen3VLMoeForConditionalGeneration": read_qwen3_moe,
    "Qwen3NextForCausalLM": read_qwen3_5,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": read_qwen3_5,
}

# Seen in configs and refused: what of them the shared types or the config cannot express.
_UNMODELLED = {
    "DeciLMForCausalLM": "every layer has a shape of its own",
    "DeepseekV4ForCausalLM": "its KV cache is compressed by a ratio that differs between layers",
    "KimiK3ForConditionalGeneration": "its delta-attention and latent experts are not modelled",
    "MiniMaxM3ForCausalLM": "its block-sparse attention is not modelled",
    "MiniMaxM3SparseForConditionalGeneration": "its block-sparse attention is not modelled",
    "Step3p7FlashForCausalLM": "its config does not give the heads of its windowed layers",
}


def architecture_reader(name: str, where: str) -> SkeletonReader:
    """Return the reader of an architecture, or refuse it by name with the names that exist."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    reason = f" ({_UNMODELLED[name]})" if name in _UNMODELLED else ""
    known = ", ".join(ARCHITECTURES)
    raise BadInputError(
        f"{where}: architecture {name!r} is not one tonnage knows{reason}; known: {known}"
    )
