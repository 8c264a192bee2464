"""Which steps of a simulation to measure, and what the measured ones say of all the others.

Steps are sorted into strata of like size. Of each stratum a few steps are kept, drawn with the time
that each takes as its weight; those are measured, the strata with the most time first. What is
measured over what was predicted then corrects every step of the stratum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import log, log2
from typing import Literal, NamedTuple

import numpy as np

from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import FloatArray, Step

Phase = Literal["decode", "prefill", "mixed"]

_BINS_PER_DOUBLING = 2
_MOST_SAMPLES = 4  # kept of one stratum


class Stratum(NamedTuple):
    """Steps of like size: halves of doublings of requests, contexts, new and past tokens."""

    phase: Phase
    decode_requests: int
    mean_context: int
    chunks: int
    new_tokens: int
    past_tokens: int


def stratum_of(step: Step) -> Stratum:
    """Return the stratum of a step."""
    requests, chunks = step.decode_requests, step.prefill_chunks
    phase: Phase = "mixed" if requests and chunks else "prefill" if chunks else "decode"
    return Stratum(
        phase,
        _bin(requests),
        _bin(step.decode_context_sum / requests if requests else 0.0),
        _bin(len(chunks)),
        _bin(sum(chunk.new_tokens for chunk in chunks)),
        _bin(sum(chunk.past_tokens for chunk in chunks)),
    )


def _bin(size: float) -> int:
    """Return 0 for nothing, else a number that rises by two per doubling."""
    return 1 + round(_BINS_PER_DOUBLING * log2(size)) if size >= 1.0 else 0


@dataclass(slots=True)
class Visited:
    """What a simulation did of one stratum: steps, their predicted time, and some of them."""

    steps: int = 0
    seconds: float = 0.0
    kept: list[tuple[float, Step]] = field(default_factory=list)  # (draw, step), the largest draws

    def samples(self) -> list[Step]:
        """Return the steps that were kept, the first drawn first."""
        return [step for _, step in sorted(self.kept, key=lambda one: -one[0])]


class VisitingExecutor:
    """Predict steps as another predictor does, and note those that are asked for one by one."""

    def __init__(self, predictor: StepPredictor, seed: int) -> None:
        """Start with nothing seen; the seed decides which steps are kept."""
        self.visited: dict[Stratum, Visited] = {}
        self._predictor = predictor
        self._rng = np.random.default_rng(seed)

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        durations_s = self._predictor.run(step, max_steps)
        self._note(step, float(durations_s[0]))
        return durations_s

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step."""
        return self._predictor.times(step)

    def _note(self, step: Step, seconds: float) -> None:
        stratum = self.visited.setdefault(stratum_of(step), Visited())
        stratum.steps += 1
        stratum.seconds += seconds
        # Weighted sampling without replacement (Efraimidis and Spirakis, 2006): the largest of
        # u^(1/w), here as logs.
        draw = log(1.0 - self._rng.random()) / seconds
        if len(stratum.kept) < _MOST_SAMPLES:
            stratum.kept.append((draw, _alone(step)))
            return
        least = min(range(_MOST_SAMPLES), key=lambda index: stratum.kept[index][0])
        if draw > stratum.kept[least][0]:
            stratum.kept[least] = draw, _alone(step)


def _alone(step: Step) -> Step:
    """Return a step whose contexts nobody else writes to."""
    return replace(step, decode_context_tokens=step.decode_context_tokens.copy())


def phases_of(visited: Iterable[Stratum]) -> int:
    """Return how many phases some strata have: so many steps are measured at least."""
    return len({one.phase for one in visited})


def measuring_order(visited: Mapping[Stratum, Visited]) -> Iterator[tuple[Stratum, Step]]:
    """Yield the steps to measure: one of each stratum, those with the most time first; then more.

    So whenever the time for it is over, most of the simulation's time has been looked at. Before
    all others comes the heaviest stratum of each phase, as no other phase can correct it.
    """
    strata = sorted(visited, key=lambda one: (-visited[one].seconds, one))
    firsts = {one.phase: one for one in reversed(strata)}
    strata.sort(key=lambda one: firsts[one.phase] != one)
    for number in range(_MOST_SAMPLES):
        for stratum in strata:
            samples = visited[stratum].samples()
            if number < len(samples):
                yield stratum, samples[number]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One step that was measured: its median, and what was predicted for it."""

    stratum: Stratum
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Correction:
    """Measured over predicted time, by stratum; `by_phase` for the strata that were not reached."""

    by_stratum: Mapping[Stratum, float]
    by_phase: Mapping[Phase, float]

    def of(self, stratum: Stratum) -> float:
        """Return the factor on the predicted time of a step."""
        found = self.by_stratum.get(stratum)
        return self.by_phase.get(stratum.phase, 1.0) if found is None else found


def correction(
    measurements: Iterable[Measurement], visited: Mapping[Stratum, Visited]
) -> Correction:
    """Return what the measured steps say of all.

    Of a stratum the ratio of sums; of a phase the mean over its measured strata, weighted by the
    time that the simulation spends in each.
    """
    sums: dict[Stratum, tuple[float, float]] = {}
    for one in measurements:
        measured_s, predicted_s = sums.get(one.stratum, (0.0, 0.0))
        sums[one.stratum] = measured_s + one.measured_s, predicted_s + one.predicted_s
    ratios = {stratum: measured / predicted for stratum, (measured, predicted) in sums.items()}
    weights: dict[Phase, tuple[float, float]] = {}
    for stratum, ratio in ratios.items():
        seconds = visited[stratum].seconds
        total, weighted = weights.get(stratum.phase, (0.0, 0.0))
        weights[stratum.phase] = total + seconds, weighted + seconds * ratio
    return Correction(
        ratios, {phase: weighted / total for phase, (total, weighted) in weights.items()}
    )


def share_measured(
    measurements: Iterable[Measurement], visited: Mapping[Stratum, Visited]
) -> float:
    """Return the share of the simulation's predicted time whose strata were measured."""
    total_s = sum(one.seconds for one in visited.values())
    reached = {one.stratum for one in measurements}
    return sum(visited[one].seconds for one in reached) / total_s if total_s else 0.0


class CorrectedExecutor:
    """Predict steps as another predictor does, times what measured ones of their size took."""

    def __init__(self, predictor: StepPredictor, found: Correction) -> None:
        """Take the predictor that was measured against."""
        self._predictor = predictor
        self._correction = found

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        durations_s = self._predictor.run(step, max_steps)
        return durations_s * self._factors(step, len(durations_s))

    def _factors(self, step: Step, steps: int) -> FloatArray | float:
        """Return the factor of each of some steps whose contexts grow on the way."""
        first = stratum_of(step)
        requests = step.decode_requests
        if steps == 1 or not requests:
            return self._correction.of(first)
        growth = requests if step.decode_context_growth is None else step.decode_context_growth
        means = (step.decode_context_sum + growth * np.arange(steps)) / requests
        bins = 1 + np.rint(_BINS_PER_DOUBLING * np.log2(means)).astype(np.int64)
        factors = np.empty(steps)
        for bin_of_some in np.unique(bins).tolist():
            stratum = first._replace(mean_context=bin_of_some)
            factors[bins == bin_of_some] = self._correction.of(stratum)
        return factors

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step."""
        factor = self._correction.of(stratum_of(step))
        return [one.scaled(factor) for one in self._predictor.times(step)]
