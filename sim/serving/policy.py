"""How each serving engine schedules, per version, as data.

Sources: SGLang 0.5.23 `srt/managers/scheduler.py`, `schedule_policy.py` (admission),
`schedule_batch.py` (retraction), `srt/server_args.py` (attention-DP) and
`srt/disaggregation/decode.py` (pre-allocation); vLLM 0.19 `v1/core/sched/scheduler.py` and
`async_scheduler.py`; TensorRT-LLM 1.2 `_torch/pyexecutor/scheduler/scheduler.py` (capacity policy
GUARANTEED_NO_EVICT, micro batches) and `llmapi/llm.py` (`_check_arguments`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tonnage.sim.units import version_key

Victim = Literal["fewest_outputs", "latest"]


@dataclass(frozen=True, slots=True)
class Policy:
    """One engine's scheduling rules; the defaults are the simplest ones.

    - `mixed`: prompt chunks and tokens share a step; else prompts go before tokens.
    - `lag_steps`: a step is planned when the one before it starts, so what arrives or ends during
      a step is seen one step late. `wasted_step`: a request that has ended stays in the batch
      meanwhile; without it only its pages and its place are held.
    - `charges_outputs`: a prompt starts only when there is room for the tokens that it and the
      running requests may still write (`output_charge_most` each at most; the running ones' times
      a ratio that falls with every step that ran without retraction).
    - `evicts`: running requests may lose their pages; else one starts only when there is room for
      all that it and the running ones may still write, in whole pages.
    - `aligns_chunks`: a prompt that is cut is cut at the end of a page. `whole_prompts`: one that a
      step could hold is never cut; it waits for a step that has room for all of it.
    - `victim`: who loses its pages when there are none left: the request with the fewest output
      tokens (of those the longest prompt), or the one let in last. `requeue_first`: it waits
      before all others, not behind them. `keeps`: which of its full pages can be used again as
      long as nobody else has taken them. `free_first`: other free pages are taken before those.
    - `aborts_last`: a last request for which there is no page is aborted; else it waits too.
    - `reserved_decode_tokens`: a decode pool leaves room for so many tokens per request it holds.
      `allocates_before_prefill`: a decode pool gives its pages before the prompt is computed.
      `backs_up`: a decode pool keeps the KV of a retracted request in host memory.
    - `rank_choice`: which attention-DP rank a request goes to. `splits_chunks`: the prompt tokens
      of a step are those of all ranks together. `rank_caution`: times the ratio, under several.
    """

    name: str = "plain"
    mixed: bool = False
    lag_steps: int = 0
    wasted_step: bool = False
    charges_outputs: bool = False
    output_charge_most: int = 4096
    ratio_start: float = 0.7
    ratio_least: float = 0.7 * 0.14
    ratio_decay_steps: int = 600
    retract_ahead_steps: int = 20
    evicts: bool = True
    aligns_chunks: bool = False
    whole_prompts: bool = False
    victim: Victim = "latest"
    requeue_first: bool = True
    keeps: Literal["nothing", "prompt", "all"] = "nothing"
    free_first: bool = False
    aborts_last: bool = False
    reserved_decode_tokens: int = 0
    allocates_before_prefill: bool = False
    backs_up: bool = False
    rank_choice: Literal["round_robin", "least_requests"] = "round_robin"
    splits_chunks: bool = False
    rank_caution: float = 1.0

    def for_ranks(self, ranks: int) -> Policy:
        """Return the rules of each of so many attention-DP ranks."""
        if ranks == 1:
            return self
        start, least = (ratio * self.rank_caution for ratio in (self.ratio_start, self.ratio_least))
        return replace(self, ratio_start=start, ratio_least=least)

    def rank_chunk_tokens(self, chunk_tokens: int, ranks: int) -> int:
        """Return the most prompt tokens of one rank's step."""
        return max(chunk_tokens // ranks, 1) if self.splits_chunks else chunk_tokens


PLAIN = Policy()
SGLANG = Policy(
    name="sglang 0.5.23",
    lag_steps=1,
    wasted_step=True,
    charges_outputs=True,
    aligns_chunks=True,
    victim="fewest_outputs",
    requeue_first=False,
    keeps="prompt",
    free_first=True,
    aborts_last=True,
    reserved_decode_tokens=512,
    allocates_before_prefill=True,
    backs_up=True,
    splits_chunks=True,
    rank_caution=0.3,
)
VLLM_SYNC = Policy(name="vllm 0.11", mixed=True, keeps="all", rank_choice="least_requests")
VLLM = replace(VLLM_SYNC, name="vllm 0.19", lag_steps=1)  # async scheduling is its default
# Prompts and tokens share a step; prompts are whole, as chunked prefill is off by default (longer
# ones than a step are refused there; here they are cut, as if it were on). A prompt starts only
# when the pool holds all that the running requests and it may still write, so nobody is evicted.
# The next step is planned beside the one that runs (`disable_overlap_scheduler: false`); one that
# has all its tokens by then is left out of it (`GENERATION_TO_COMPLETE`).
TRTLLM = Policy(
    name="trtllm 1.2",
    mixed=True,
    lag_steps=1,
    charges_outputs=True,
    output_charge_most=2**62,
    evicts=False,
    whole_prompts=True,
    rank_choice="least_requests",
)

# By engine: (first version, its rules), the newest last. vLLM plans ahead since 0.14 (pull
# request 27614).
KNOWN_POLICIES: dict[str, tuple[tuple[str, Policy], ...]] = {
    "sglang": (("0.0.0", SGLANG),),
    "vllm": (("0.0.0", VLLM_SYNC), ("0.14.0", VLLM)),
    "trtllm": (("0.0.0", TRTLLM),),
}


def policy_for(engine: str, version: str) -> Policy:
    """Return the rules that an engine's version schedules by."""
    asked = version_key(version)
    known = [rules for first, rules in KNOWN_POLICIES[engine] if version_key(first) <= asked]
    return known[-1]
