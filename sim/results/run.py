"""What one simulated or executed run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.sim.results.attempts import AttemptLog, OutageLog
from tonnage.sim.results.records import Records
from tonnage.sim.results.sketch import QuantileSketch
from tonnage.sim.serving.integrity import IntegrityBooks
from tonnage.sim.serving.tiers import TierBooks


@dataclass(slots=True)
class RunResult:
    """One run: a record per request, the gaps between tokens, and the steady decode rate.

    `steady_decode_tokens_per_s` counts the tokens of all decoding instances between the end of
    the ramp (`steady_from_s`) and the last arrival (`steady_to_s`); None if that span is empty.
    `peak_requests`: the most that decoded together, over all instances of the pool. `pages_left`:
    KV pages still held when every request has ended; resident requests never have. `cache`: what
    was written to the tiers of a prefix cache; None where prompts share nothing. `attempts`,
    `outages`: None where clients try once and nothing goes wrong. `integrity`: what watched the
    pages, None where nothing did.
    """

    records: Records
    gaps: QuantileSketch
    makespan_s: float
    busy_s: dict[str, list[float]]
    steady_decode_tokens_per_s: float | None
    steady_from_s: float
    steady_to_s: float
    peak_requests: int
    pages_left: int = 0
    cache: TierBooks | None = None
    attempts: AttemptLog | None = None
    outages: OutageLog | None = None
    integrity: IntegrityBooks | None = None
