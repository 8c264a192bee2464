"""What an engine makes of its kernels: factors by operator family, and the host's own time.

Kernel tables time each operator alone. In an engine some are fused, launched from a graph, or
replaced by another kernel, and the host schedules, samples and answers around them. A handful of
terms per engine says by how much; `calibrate/fit_engines.py` fits them on measured serving runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tonnage.sim.domain import LinearAttention, MlaAttention, ModelSpec


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """Terms of one engine on one generation of GPUs.

    - `factors`: on the kernels' times by family, `product.fp8`, `experts.nvfp4`, `decode.mla`,
      `prefill.gqa`, `all_reduce`, `small_kernels`, `sampling`; 1 for those that are not named.
    - `step_s`, `sequence_s`: the host's time in each step, and for each sequence in it.
    - `launch_s`: a kernel's launch outside a graph; a step that is not captured takes the host so
      much per kernel at least, however few tokens it has.
    - `request_s`: before a prompt is queued (HTTP, tokeniser).
    - `request_steps`: decode steps that pass before the scheduler looks at a new request, on
      average (SGLang's `--scheduler-recv-interval`), and before a first token is streamed.
    """

    factors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    step_s: float = 0.0
    sequence_s: float = 0.0
    launch_s: float = 0.0
    request_s: float = 0.0
    request_steps: float = 0.0

    def factor(self, family: str) -> float:
        """Return what the kernels' time of an operator family is multiplied by."""
        return self.factors.get(family, 1.0)

    def request_delay_s(self, step_s: float) -> float:
        """Return the seconds that a request waits outside the scheduler before its first token."""
        return self.request_s + self.request_steps * step_s


KERNELS_ALONE = EngineTerms()


def attention_kind(model: ModelSpec) -> str:
    """Return what prompts of a model are launched as: mla, dsa, linear (some layers), or gqa."""
    attentions = {layer.attention for layer in model.layers if layer.attention is not None}
    if any(isinstance(one, LinearAttention) for one in attentions):
        return "linear"
    latents = [one for one in attentions if isinstance(one, MlaAttention)]
    if not latents:
        return "gqa"
    return "dsa" if any(one.indexer is not None for one in latents) else "mla"
