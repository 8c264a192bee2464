"""Scores of a model under two formats, and what each pair of them shows: never that they are equal.

Shares are of 1 here; points of a score are hundredths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from tonnage.sim.planning.proportions import (
    Counts,
    Interval,
    Paired,
    detectable_difference,
    difference_interval,
    independent_variance,
    mcnemar_p,
    paired_interval,
    questions_for_equivalence,
)

# worse, better: told from noise. within: nearer than the margin, and not told from noise.
# undecided: neither. unknown: nobody says how many questions there were.
Verdict = Literal["worse", "better", "within", "undecided", "unknown"]


@dataclass(frozen=True, slots=True)
class Standards:
    """How sure one wants to be: a margin in shares, confidence, and power of what is planned."""

    margin: float = 0.01
    confidence: float = 0.95
    power: float = 0.8


@dataclass(frozen=True, slots=True)
class ScorePair:
    """One test under the baseline's format and the variant's.

    `baseline` and `variant` are shares of right answers; `questions` None is unknown. `pairs`: the
    answers question by question. `pooled` False: its questions are counted in another test.
    """

    test: str
    baseline: float
    variant: float
    questions: int | None = None
    pairs: Paired | None = None
    pooled: bool = True

    def counts(self) -> tuple[Counts, Counts] | None:
        """Return right answers, rounded to whole questions; None where their number is unknown."""
        if self.questions is None:
            return None
        shares = self.baseline, self.variant
        first, second = (Counts(round(share * self.questions), self.questions) for share in shares)
        return first, second


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one pair of scores shows.

    `interval` is of variant - baseline at the confidence asked for. `is_within_margin`: two
    one-sided tests say that it is nearer than the margin; something told from noise can be.
    `questions_needed`: for that statement, were there no difference. `detectable`: the difference
    that as many questions mostly show.
    """

    pair: ScorePair
    difference: float
    verdict: Verdict
    interval: Interval | None = None
    is_within_margin: bool = False
    questions_needed: int | None = None
    detectable: float | None = None
    mcnemar_p: float | None = None


@dataclass(frozen=True, slots=True)
class Pooled:
    """All questions of several tests together: the difference of their mean shares."""

    tests: tuple[str, ...]
    questions: int
    difference: float
    interval: Interval


def compare(pair: ScorePair, standards: Standards) -> Comparison:
    """Say whether the difference of two scores can be told from noise, or is within the margin."""
    counts = pair.counts()
    if counts is None:
        return Comparison(pair, pair.variant - pair.baseline, "unknown")
    confidence = standards.confidence
    interval = _interval(pair, counts, confidence)
    # Two one-sided tests at 1 - confidence each.
    within = _interval(pair, counts, 2.0 * confidence - 1.0).is_within(standards.margin)
    variance = _variance(pair, counts)
    return Comparison(
        pair=pair,
        difference=counts[1].share - counts[0].share,
        verdict=_verdict(interval, within),
        interval=interval,
        is_within_margin=within,
        questions_needed=questions_for_equivalence(
            variance, standards.margin, standards.power, confidence
        ),
        detectable=detectable_difference(
            variance, counts[0].questions, standards.power, confidence
        ),
        mcnemar_p=None if pair.pairs is None else mcnemar_p(pair.pairs),
    )


def pool(pairs: Sequence[ScorePair], confidence: float) -> Pooled | None:
    """Return the difference over all questions of the tests that have a number of them.

    Tests are strata: each keeps its own shares, and weighs as many as it has questions. Limits are
    Newcombe's distances of the tests, squared and added.
    """
    known = [(pair, counts) for pair in pairs if pair.pooled and (counts := pair.counts())]
    total = sum(counts[0].questions for _, counts in known)
    if total == 0:
        return None
    difference = below = above = 0.0
    for pair, counts in known:
        weight = counts[0].questions / total
        own = counts[1].share - counts[0].share
        interval = _interval(pair, counts, confidence)
        difference += weight * own
        below += (weight * (own - interval.low)) ** 2
        above += (weight * (interval.high - own)) ** 2
    return Pooled(
        tuple(pair.test for pair, _ in known),
        total,
        difference,
        Interval(difference - sqrt(below), difference + sqrt(above)),
    )


def _interval(pair: ScorePair, counts: tuple[Counts, Counts], confidence: float) -> Interval:
    if pair.pairs is not None:
        return paired_interval(pair.pairs, confidence)
    return difference_interval(*counts, confidence)


def _verdict(interval: Interval, within: bool) -> Verdict:
    if interval.excludes_zero:
        return "worse" if interval.high < 0 else "better"
    return "within" if within else "undecided"


def _variance(pair: ScorePair, counts: tuple[Counts, Counts]) -> float:
    """Return the variance of the difference per question, not 0 where every answer was alike."""
    questions = counts[0].questions
    if pair.pairs is not None:
        return (pair.pairs.only_baseline + pair.pairs.only_variant + 1) / (questions + 2)
    right = counts[0].correct + counts[1].correct
    return independent_variance((right + 1) / (2 * questions + 2))
