"""What served a row of results: our model, GPU and formats, and the settings that it ran with.

Result files state neither the KV format nor the memory fraction. Where a model was measured in
public runs, its settings are those of their scripts (SemiAnalysisAI/InferenceX `benchmarks/*.sh`,
March 2026); else the engine's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

_MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-r1",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "MiniMaxAI/MiniMax-M2.7": "minimax-m2.7",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-405B": "llama-3.1-405b",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
    "moonshotai/Kimi-K2.5": "kimi-k2.5",
    "moonshotai/Kimi-K2.6": "kimi-k2.6",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "zhipuai/GLM-5": "glm-5",
    "zai-org/GLM-5": "glm-5",
}
# Their own checkpoints are FP8 in blocks, whatever a file calls it.
_BLOCK_CHECKPOINTS = {"Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3.5-397B-A17B"}
_MXFP4 = ("gpt-oss-120b", "gpt-oss-20b")
GPUS = {
    "a100_sxm": "a100-80g",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
_HOPPER = ("h100-sxm", "h200-sxm")


def model_of(repository: str) -> str | None:
    """Return our name of a model, None where it is not described."""
    return _MODELS.get(repository)


def weights_of(repository: str, model: str, native: str, formats: tuple[str | None, ...]) -> str:
    """Return the weights of a pool; `native`: the format of the catalogue's checkpoint.

    `formats`: precision, GEMM format and expert format as a file states them. FP8 is a checkpoint's
    own where it has FP8 blocks, blocks where one of the formats says so, else one scale per tensor.
    FP4 is NVFP4, but gpt-oss is MXFP4 as it is released.
    """
    precision = formats[0]
    if model in _MXFP4 or precision == "int4":
        return "native"
    if precision == "fp4":
        return "nvfp4"
    if precision == "fp8":
        if native == "fp8_block":
            return "native"
        is_blocks = repository in _BLOCK_CHECKPOINTS or "fp8_block" in formats
        return "fp8_block" if is_blocks else "fp8"
    return "native" if native == "bf16" else "bf16"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server ran with; None is the engine's default.

    `chunk_beside`: the chunk holds so many tokens beside the prompt and one per user, as scripts
    compute TensorRT-LLM's `max_num_tokens`, and `chunk_tokens` at least. `polls_seldom`: SGLang
    looks at new requests every some decode steps.
    """

    kv: str = "bf16"
    mem_fraction: float | None = None
    chunk_tokens: int | None = None
    chunk_beside: int | None = None
    max_running_requests: int | None = None
    polls_seldom: bool = False

    def polled_every_steps(self, concurrency: int) -> int:
        """Return the decode steps between two looks at new requests (`--scheduler-recv-interval`).

        Scripts for Blackwell set 30, and 10 below 16 users.
        """
        if not self.polls_seldom:
            return 1
        return 30 if concurrency >= 16 else 10

    def chunk(self, input_tokens: int, concurrency: int) -> int | None:
        """Return the prompt tokens of one step."""
        if self.chunk_beside is None:
            return self.chunk_tokens
        needed = -(-(input_tokens + concurrency + self.chunk_beside) // 64) * 64
        return max(needed, self.chunk_tokens or 0)


def settings_of(model: str, engine: str, gpu: str, weights: str) -> Settings:
    """Return the settings of public runs of a model, else the engine's defaults."""
    if engine == "trtllm":
        return _trtllm(model, gpu, weights)
    if engine == "sglang":
        return _sglang(model, gpu, weights)
    return _vllm(model, gpu)


def _trtllm(model: str, gpu: str, weights: str) -> Settings:
    # KV is FP8 wherever weights are quantised; gpt-oss on Hopper keeps `dtype: auto`.
    if model in _MXFP4:
        kv = "bf16" if gpu in _HOPPER else "fp8_e4m3"
        return Settings(kv, 0.85, 20000, max_running_requests=512)
    kv = "bf16" if weights == "native" and model.startswith(("llama", "qwen")) else "fp8_e4m3"
    if model.startswith("deepseek"):
        fraction = 0.75 if gpu in _HOPPER else 0.8
        return Settings(kv, fraction, 8192, chunk_beside=64)
    if model == "llama-3.1-70b":
        return Settings(kv, None, 2048, chunk_beside=1024, max_running_requests=1024)
    return Settings(kv, None, 8192, chunk_beside=64)


def _sglang(model: str, gpu: str, weights: str) -> Settings:
    kv = "bf16" if gpu in _HOPPER else "fp8_e4m3"
    if model.startswith("deepseek"):
        if gpu in _HOPPER:
            return Settings(kv, 0.82, 32768, max_running_requests=512)
        if weights == "nvfp4":
            return Settings(kv, 0.85, 16384, max_running_requests=256, polls_seldom=True)
        return Settings(kv, 0.82, 32768, max_running_requests=256, polls_seldom=True)
    if model == "qwen3.5-397b-a17b":
        kv = "bf16" if weights == "native" else "fp8_e4m3"
        if gpu in _HOPPER:
            return Settings(kv, 0.8, 16384, max_running_requests=128)
        return Settings(kv, 0.82, 32768, max_running_requests=256, polls_seldom=True)
    if model == "glm-5":
        return Settings("fp8_e4m3", 0.85, 32768)
    return Settings()


def _vllm(model: str, gpu: str) -> Settings:
    if model in _MXFP4:
        kv = "bf16" if gpu in _HOPPER else "fp8_e4m3"
        return Settings(kv, 0.9, 8192, max_running_requests=512)
    if model == "llama-3.1-70b":
        return Settings("fp8_e4m3", 0.9, 8192, max_running_requests=512)
    if model == "minimax-m2.5":
        kv = "bf16" if gpu in _HOPPER else "fp8_e4m3"
        return Settings(kv, mem_fraction=0.95)
    if model == "kimi-k2.5":
        return Settings(mem_fraction=0.9)
    return Settings()
