"""Steps of a GPU that nobody timed: those of a timed one by the ratio of the two datasheets."""

from __future__ import annotations

from dataclasses import replace

from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import FloatArray, Step

_SPREAD = 1.3  # what the ratio of two datasheets leaves open, either way


class ScaledExecutor:
    """A timed GPU's step, times the roofline of this GPU over the roofline of that one."""

    def __init__(self, timed: StepPredictor, there: StepPredictor, here: StepPredictor) -> None:
        """Take the steps of the timed GPU and the rooflines of both, of one model and layout."""
        self._timed, self._there, self._here = timed, there, here

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        ratio = self._here.run(step, max_steps) / self._there.run(step, max_steps)
        seconds: FloatArray = self._timed.run(step, max_steps) * ratio
        return seconds

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step, all scaled by the step's ratio."""
        ratio = float(self._here.run(step, 1)[0] / self._there.run(step, 1)[0])
        return [
            replace(
                one.scaled(ratio),
                low_s=one.low_s * ratio / _SPREAD,
                high_s=one.high_s * ratio * _SPREAD,
                source="datasheet" if one.source == "datasheet" else "scaled",
            )
            for one in self._timed.times(step)
        ]
