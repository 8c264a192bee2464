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


def published_drafts(
    row: ServingRow, model: str, gpu: str, layout: ParallelLayout
) -> tuple[int, ...]:
    """Return the draft tokens that a row may have run with, 0 without speculation.

    Where both were published the speculating one is first: taking a run for speculating that does
    not is an error of less than half its time per token, the other way round of more.
    """
    if not model.startswith("deepseek"):
        return (0,)
    if row.engine == "trtllm":
        drafts = 1 if layout.attention_dp > 1 else 3
        if row.version == _ALWAYS:
            return (drafts,)
        if row.version == _HOPPER and gpu == "h200-sxm":
            users = row.concurrency or 0
            return (drafts,) if users > _HOPPER_BOTH_MOST else (drafts, 0)
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
