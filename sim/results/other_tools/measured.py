"""What a benchmark client measured at one load, in this package's terms.

TTFT: from sending to the first token. TPOT: (end to end - TTFT) / (output tokens - 1), per request,
then the mean over requests. ITL: the gap between tokens, pooled. Throughput counts output tokens
alone. Figures are named as in the points of `simulate --json`, such as `latency.ttft_s.mean`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """One load: `concurrency` users in a closed loop, or `rate_per_s` requests; None is neither.

    `input_tokens`, `output_tokens`: means over the requests that were served. `notes`: how the
    tool's definitions were converted.
    """

    tool: str
    concurrency: int | None
    rate_per_s: float | None
    figures: Mapping[str, float]
    completed: int | None = None
    failed: int | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def label(self) -> str:
        """Name the load, such as `concurrency 8`."""
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return "load not stated" if self.rate_per_s is None else f"rate {self.rate_per_s:g}/s"
