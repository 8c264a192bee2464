"""Which public runs speculated: result files do not say so, and it halves the time per token.

Source: SemiAnalysisAI/InferenceX `.github/configs/nvidia-master.yaml`, March 2026, and the scripts
it names (three MTP drafts, one under attention-DP in TensorRT-LLM; two in SGLang).
"""

from __future__ import annotations

from tonnage.scenarios.serving_rows import ServingRow
from tonnage.sim.domain import BadInputError, ParallelLayout
from tonnage.sim.units import version_key

_ALWAYS = "1.2.0rc6.post3"  # dsr1-fp4-b200-trt-mtp and dsr1-fp8-b200-trt-mtp alone
_HOPPER = "1.1.0rc2.post2"  # dsr1-fp8-h200-trt and -mtp: both up to 64 users, MTP alone beyond
_HOPPER_BOTH_MOST = 64
_SGLANG_SINCE, _SGLANG_DRAFTS = (0, 5, 8), 2


def speculates_first(row: ServingRow, gpu: str) -> bool:
    """Tell which of two published runs a row is taken for where both fit its columns.

    Result files write DeepSeek-R1 for runs of one recipe and DeepSeek-V3 for those of another: in
    `serving_latency.csv` the rows of V3, of SGLang's disaggregated runs and of TensorRT-LLM on H100
    take twice as long per token as speculating ones would (medians of 1.9 to 3.0 by engine and
    GPU), the others do not (1.0 to 1.8).
    """
    is_plain = row.model.endswith("DeepSeek-V3") or row.engine == "sglang" or gpu == "h100-sxm"
    return not is_plain


def published_drafts(
    row: ServingRow, model: str, gpu: str, layout: ParallelLayout
) -> tuple[int, ...]:
    """Return the draft tokens that a row may have run with, 0 without speculation.

    Where both were published the likelier one is first (`speculates_first`).
    """
    if not model.startswith("deepseek"):
        return (0,)
    if row.engine == "trtllm":
        drafts = 1 if layout.attention_dp > 1 else 3
        if row.version == _ALWAYS:
            return (drafts,)
        if row.version == _HOPPER and gpu == "h200-sxm":
            users = row.concurrency or 0
            if users > _HOPPER_BOTH_MOST:
                return (drafts,)
            return (drafts, 0) if speculates_first(row, gpu) else (0, drafts)
    if row.engine == "sglang" and _is_sglang_mtp(row, gpu, layout):
        return (_SGLANG_DRAFTS,)
    return (0,)


def _is_sglang_mtp(row: ServingRow, gpu: str, layout: ParallelLayout) -> bool:
    """Tell whether it is a point of dsr1-fp8-b200-sglang-mtp that has no plain counterpart."""
    if gpu != "b200-sxm" or row.precision != "fp8" or layout != ParallelLayout(8):
        return False
    lengths, users = (row.input_tokens, row.output_tokens), row.concurrency or 0
    most_plain = 4 if lengths == (8192, 1024) else 64
    try:
        version = version_key(row.version or "0")
    except BadInputError:
        return False
    return users > most_plain and version >= _SGLANG_SINCE
