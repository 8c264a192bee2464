"""Session loads for tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tonnage.sim.traffic.arrivals import GammaArrivals
from tonnage.sim.traffic.durations import ExponentialDuration
from tonnage.sim.traffic.lengths import Constant, Uniform
from tonnage.sim.traffic.session_sources import DrawnSessions
from tonnage.sim.traffic.spec import SessionSpec

SPEC = SessionSpec(
    count=30,
    turns=Uniform(1, 9),
    shared_prefix_tokens=700,
    shared_prefixes=3,
    zipf_exponent=1.0,
    first_input_tokens=Uniform(1, 400),
    new_input_tokens=Uniform(1, 300),
    output_tokens=Uniform(1, 60),
    think_time=ExponentialDuration(2.0),
    compact_at_tokens=None,
    compacted_tokens=Constant(100),
    rewrite_share=0.0,
    block_tokens=16,
)


def drawn(
    spec: SessionSpec = SPEC, *, rate_per_s: float | None = None, seed: int = 0, **changes: object
) -> DrawnSessions:
    """Return sessions with some fields of the specification changed."""
    arrivals = None if rate_per_s is None else GammaArrivals(rate_per_s)
    changed = replace(spec, **changes)  # type: ignore[arg-type]
    return DrawnSessions(changed, arrivals, np.random.SeedSequence(seed))
