"""Steps of a pool whose KV is watched: the step, and what the check adds to it."""

from __future__ import annotations

import numpy as np

from tonnage.sim.cost.integrity import StepCheck, Watched
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.step_time import RAMP, StepPredictor, growth_of
from tonnage.sim.domain import FloatArray, ParallelLayout, Step


class WatchedExecutor:
    """Predict steps with a check in front of each.

    Attention-DP ranks step together: the one that looks at most sets the time of the check, as if
    it came before the slowest in everything else too.
    """

    def __init__(
        self,
        steps: StepPredictor,
        check: StepCheck,
        layout: ParallelLayout,
        captured_most: int,
    ) -> None:
        """`captured_most`: requests of a rank up to which a step runs as a graph."""
        self.check = check
        self._steps, self._layout, self._captured_most = steps, layout, captured_most
        self._ranks = layout.attention_dp

    def checked_by(self, check: StepCheck) -> WatchedExecutor:
        """Return what predicts the same steps with another check in front."""
        return WatchedExecutor(self._steps, check, self._layout, self._captured_most)

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        seconds = self._steps.run(step, max_steps)
        ramp = RAMP[: len(seconds)]
        if not step.ranks:
            alone_s: FloatArray = seconds + self.check.seconds(self._watched(step, step, ramp))
            return alone_s
        added_s = np.zeros(len(seconds))
        for rank in step.ranks:
            if rank.decode_requests or rank.prefill_chunks:
                checked_s = self.check.seconds(self._watched(step, rank, ramp))
                np.maximum(added_s, checked_s, out=added_s)
        together_s: FloatArray = seconds + added_s
        return together_s

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step that is spread evenly over the attention-DP ranks."""
        watched = self._watched(step, step, RAMP[:1])
        return self._steps.times(step) + self.check.items(watched)

    def _watched(self, step: Step, of: Step, ramp: FloatArray) -> Watched:
        """Return what one rank looks at: its own step, or an even share of the instance's."""
        share = 1 / self._ranks if of is step else 1.0
        chunks, requests = of.prefill_chunks, of.decode_requests
        growth = growth_of(of)
        fullest = requests * share
        if step.ranks:
            fullest = max(rank.decode_requests for rank in step.ranks)
        return Watched(
            requests=requests * share,
            contexts=growth * share * ramp + of.decode_context_sum * share,
            growth=growth * share,
            query_tokens=step.query_tokens,
            past_tokens=share * sum(chunk.past_tokens for chunk in chunks) if chunks else 0.0,
            new_tokens=share * sum(chunk.new_tokens for chunk in chunks) if chunks else 0.0,
            captured=not step.prefill_chunks and fullest <= self._captured_most,
        )
