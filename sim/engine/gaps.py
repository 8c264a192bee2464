"""Inter-token latency: the gaps between consecutive tokens, as one distribution per batch."""

from __future__ import annotations

from collections.abc import Sequence

from tonnage.sim.engine.clock import TICK_S, Segment
from tonnage.sim.results.sketch import QuantileSketch

_FEW_STEPS = 4  # one by one is faster


class TokenGaps:
    """Collect the gaps that running sequences see, segment by segment.

    A gap runs from one token to the next, so it holds everything between two decode steps: for a
    colocated instance, the prefill steps too. A sequence's first gap starts at its first token.
    """

    def __init__(self) -> None:
        self.sketch = QuantileSketch(unit=TICK_S)
        self.last_token_s = 0.0  # end of the last decode step

    def add_one(self, gap_s: float) -> None:
        """Add the gap of a sequence whose next token came with its prompt computed again."""
        self.sketch.add_one(gap_s / TICK_S)

    def add_together(self, tokens: int) -> None:
        """Add tokens that came in one step with another token of their sequence."""
        self.sketch.add_one(0.0, tokens)

    def record(self, segment: Segment, sequences: int, newcomers_s: Sequence[float]) -> None:
        """Add the gaps of a segment's steps that were done, a token per sequence and step.

        `newcomers_s` holds the times of the last token before it of those sequences that were not
        in the step before.
        """
        steps, start_s = segment.steps, segment.start_s
        done = 0  # steps whose gaps are not simply their durations
        if newcomers_s or self.last_token_s != start_s:
            done = 1
            first_end_s = segment.end_of(1)
            for then_s in newcomers_s:
                self.sketch.add_one((first_end_s - then_s) / TICK_S)
            veterans = sequences - len(newcomers_s)
            if veterans:
                self.sketch.add_one((first_end_s - self.last_token_s) / TICK_S, veterans)
        if steps - done > _FEW_STEPS:
            self.sketch.add(segment.ticks[done:steps], sequences)
        else:
            for ticks in segment.ticks[done:steps].tolist():
                self.sketch.add_one(ticks, sequences)
        self.last_token_s = segment.end_of(steps)
