"""Two shares of questions answered rightly: can their difference be told from noise?

Intervals after Newcombe (1998), built from Wilson's; equivalence by two one-sided tests, which is
the same as an interval of twice the error inside the margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from scipy.special import bdtr, ndtri

from tonnage.sim.domain import BadInputError


@dataclass(frozen=True, slots=True)
class Counts:
    """Questions answered rightly, of how many."""

    correct: int
    questions: int

    def __post_init__(self) -> None:
        if self.questions < 1 or not 0 <= self.correct <= self.questions:
            raise BadInputError(f"{self.correct} right of {self.questions} questions cannot be")

    @property
    def share(self) -> float:
        """Return the share answered rightly."""
        return self.correct / self.questions


@dataclass(frozen=True, slots=True)
class Paired:
    """The same questions under both: right under both, under one alone, under neither."""

    both: int
    only_baseline: int
    only_variant: int
    neither: int

    def __post_init__(self) -> None:
        counts = (self.both, self.only_baseline, self.only_variant, self.neither)
        if min(counts) < 0 or sum(counts) == 0:
            raise BadInputError(f"{counts}: counts of questions are 0 or more, not all of them 0")

    @property
    def baseline(self) -> Counts:
        """Return the baseline's counts."""
        return Counts(self.both + self.only_baseline, self.questions)

    @property
    def variant(self) -> Counts:
        """Return the variant's counts."""
        return Counts(self.both + self.only_variant, self.questions)

    @property
    def questions(self) -> int:
        """Return how many questions there are."""
        return self.both + self.only_baseline + self.only_variant + self.neither

    @property
    def discordant_share(self) -> float:
        """Return the share of questions that only one of the two answered rightly."""
        return (self.only_baseline + self.only_variant) / self.questions


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of a share, or of a difference of shares."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference can be told from noise."""
        return self.low > 0 or self.high < 0

    def is_within(self, margin: float) -> bool:
        """Whether all of it is nearer to 0 than the margin."""
        return -margin < self.low and self.high < margin


def wilson(counts: Counts, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval of a share."""
    z = _z(confidence)
    n, share = counts.questions, counts.share
    centre = share + z * z / (2 * n)
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At 0 and at all right the limit is exact; rounding must not move it.
    low = 0.0 if counts.correct == 0 else (centre - half) / scale
    high = 1.0 if counts.correct == n else (centre + half) / scale
    return Interval(low, high)


def difference_interval(baseline: Counts, variant: Counts, confidence: float = 0.95) -> Interval:
    """Return the interval of variant - baseline for answers that are independent of each other.

    Newcombe 1998, method 10 of the comparison of eleven: the distances from each share to its
    Wilson limits, squared and added.
    """
    return _square_and_add(baseline, variant, confidence, correlation=0.0)


def paired_interval(pairs: Paired, confidence: float = 0.95) -> Interval:
    """Return the interval of variant - baseline for answers to the same questions.

    Newcombe 1998, method 10 for paired data: as above, with the correlation of the answers,
    corrected for continuity, taken off.
    """
    return _square_and_add(pairs.baseline, pairs.variant, confidence, _correlation(pairs))


def mcnemar_p(pairs: Paired) -> float:
    """Return McNemar's exact p-value: the odds of so uneven a split of the questions that differ.

    Two-sided, binomial with an even chance for each question that only one answered rightly.
    """
    fewer = min(pairs.only_baseline, pairs.only_variant)
    differing = pairs.only_baseline + pairs.only_variant
    return min(1.0, 2.0 * float(bdtr(fewer, differing, 0.5)))


def questions_for_equivalence(
    variance: float, margin: float, power: float = 0.8, confidence: float = 0.95
) -> int:
    """Return the questions with which two alike shares are shown to be within the margin.

    `variance`: of the difference, per question: `independent_variance`, or the share of questions
    that differ where they are paired. Two one-sided tests at 1 - confidence each, no true
    difference: ``variance (z(confidence) + z((1 + power) / 2))^2 / margin^2``.
    """
    z = float(ndtri(confidence)) + float(ndtri((1 + power) / 2))
    return ceil(variance * (z / margin) ** 2)


def detectable_difference(
    variance: float, questions: int, power: float = 0.8, confidence: float = 0.95
) -> float:
    """Return the true difference that so many questions show to be one, with that power.

    ``(z((1 + confidence) / 2) + z(power)) sqrt(variance / questions)``; what is smaller is mostly
    missed.
    """
    return (_z(confidence) + float(ndtri(power))) * sqrt(variance / questions)


def independent_variance(share: float) -> float:
    """Return the variance per question of the difference of two independent shares near `share`."""
    return 2.0 * share * (1.0 - share)


def _square_and_add(
    baseline: Counts, variant: Counts, confidence: float, correlation: float
) -> Interval:
    first, second = wilson(baseline, confidence), wilson(variant, confidence)
    difference = variant.share - baseline.share
    below = _joint(variant.share - second.low, first.high - baseline.share, correlation)
    above = _joint(second.high - variant.share, baseline.share - first.low, correlation)
    return Interval(difference - below, difference + above)


def _joint(one: float, other: float, correlation: float) -> float:
    return sqrt(max(0.0, one * one - 2.0 * correlation * one * other + other * other))


def _correlation(pairs: Paired) -> float:
    """Return phi of the two-by-two table; a positive product is reduced for continuity."""
    product = float(pairs.both * pairs.neither - pairs.only_baseline * pairs.only_variant)
    if product > 0:
        product = max(0.0, product - pairs.questions / 2)
    first, second = pairs.baseline, pairs.variant
    sizes = first.correct * (first.questions - first.correct)
    sizes *= second.correct * (second.questions - second.correct)
    return product / sqrt(sizes) if sizes else 0.0


def _z(confidence: float) -> float:
    return float(ndtri((1.0 + confidence) / 2.0))
