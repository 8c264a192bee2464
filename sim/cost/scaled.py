"""Steps of a GPU that nobody timed: those of a timed one, moved by the two datasheets.

A step takes what the roofline of this GPU says, and beyond it what the timed one takes beyond its
own: small kernels, launches and bandwidth that is not reached. That part goes by the ratio of
memory bandwidths, for none of it is spent in tensor cores; scaled by the peak of these it would
grow where a GPU has few of them. Of 20 pairs of GPUs with tables of both (Llama-3.1-8B, vLLM),
this is off by 9.5 and 7.8 % in prompts of 512 and 2,048 tokens, one ratio for the whole step by
15.4 and 13.1 %; in decode steps the two agree.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import FloatArray, Step

_SPREAD = 1.3  # what two datasheets leave open, either way


class ScaledExecutor:
    """The roofline of this GPU, and what a timed GPU's step takes beyond its own."""

    def __init__(
        self,
        timed: StepPredictor,
        there: StepPredictor,
        here: StepPredictor,
        bandwidth_ratio: float,
    ) -> None:
        """Take the steps of the timed GPU and the rooflines of both, of one model and layout.

        `bandwidth_ratio`: the timed GPU's memory bandwidth over this one's.
        """
        self._timed, self._there, self._here = timed, there, here
        self._bandwidth_ratio = bandwidth_ratio

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        beyond_s = self._timed.run(step, max_steps) - self._there.run(step, max_steps)
        least_s = self._here.run(step, max_steps)
        seconds: FloatArray = least_s + np.maximum(beyond_s, 0.0) * self._bandwidth_ratio
        return seconds

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step, all scaled by the step's ratio."""
        ratio = float(self.run(step, 1)[0] / self._timed.run(step, 1)[0])
        return [
            replace(
                one.scaled(ratio),
                low_s=one.low_s * ratio / _SPREAD,
                high_s=one.high_s * ratio * _SPREAD,
                source="datasheet" if one.source == "datasheet" else "scaled",
            )
            for one in self._timed.times(step)
        ]
