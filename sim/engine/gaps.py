"""Inter-token latency: the gaps between consecutive tokens, as one distribution per instance."""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.sim.engine.clock import TICK_S, Segment
from tonnage.sim.results.sketch import QuantileSketch


class TokenGaps:
    """Collect the gaps that running sequences see, segment by segment.

    A gap runs from one token to the next, so it holds everything between two decode steps: for a
    colocated instance, the prefill steps too. A sequence's first gap starts at its first token.
    """

    def __init__(self) -> None:
        self.sketch = QuantileSketch(unit=TICK_S)
        self._last_token_s = 0.0  # end of the last decode step

    def record(self, segment: Segment, newcomers_s: Sequence[float]) -> None:
        """Add the gaps of a segment's steps that were done.

        `newcomers_s` holds the first-token times of those sequences that were not in the step
        before.
        """
        sequences, steps = segment.decode_requests, segment.steps
        if newcomers_s or self._last_token_s != segment.start_s:
            first_end_s = segment.end_of(1)
            for then_s in newcomers_s:
                self.sketch.add_one((first_end_s - then_s) / TICK_S)
            veterans = sequences - len(newcomers_s)
            if veterans:
                self.sketch.add_one((first_end_s - self._last_token_s) / TICK_S, veterans)
            if steps > 1:
                self.sketch.add(segment.ticks[1:steps], sequences)
        else:
            self.sketch.add(segment.ticks[:steps], sequences)
        self._last_token_s = segment.end_of(steps)
