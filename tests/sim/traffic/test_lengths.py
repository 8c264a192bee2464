"""Distributions of token counts: means, quantiles and the floor of one token."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError
from tonnage.sim.traffic.files import read_lengths
from tonnage.sim.traffic.lengths import (
    Constant,
    Empirical,
    LengthDistribution,
    LogNormal,
    Uniform,
)

DRAWS = 20_000


@st.composite
def distributions(draw: st.DrawFn) -> LengthDistribution:
    """Any distribution whose mean is far above one token."""
    low = draw(st.integers(50, 5_000))
    high = low + draw(st.integers(0, 5_000))
    ratio = draw(st.floats(1.05, 3.5))
    limit = draw(st.none() | st.integers(2 * low, 20 * low))
    values = draw(st.lists(st.integers(50, 5_000), min_size=1, max_size=50))
    known: list[LengthDistribution] = [
        Constant(low),
        Uniform(low, high),
        LogNormal.from_mean_and_p95(low, ratio * low, limit),
        LogNormal.from_median_and_p95(low, ratio * low, limit),
        Empirical(np.array(values, dtype=np.int64)),
    ]
    return draw(st.sampled_from(known))


@given(distributions(), st.integers(0, 2**32))
def test_draws_are_whole_positive_and_have_the_stated_mean(
    distribution: LengthDistribution, seed: int
) -> None:
    draws = distribution.sample(np.random.default_rng(seed), DRAWS)
    assert draws.dtype == np.int64
    assert draws.min() >= 1
    standard_error = float(draws.std()) / math.sqrt(DRAWS)
    assert abs(float(draws.mean()) - distribution.mean()) <= 6 * standard_error + 0.5


@given(distributions(), st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_bytes(distribution: LengthDistribution, seed: int) -> None:
    first = distribution.sample(np.random.default_rng(seed), 100)
    again = distribution.sample(np.random.default_rng(seed), 100)
    assert first.tobytes() == again.tobytes()


@given(st.integers(100, 10_000), st.floats(1.1, 3.8))
def test_lognormal_meets_its_mean_and_its_quantile(mean: int, ratio: float) -> None:
    distribution = LogNormal.from_mean_and_p95(mean, ratio * mean)
    assert distribution.mean() == pytest.approx(mean)
    p95 = math.exp(distribution.mu + 1.6448536269514722 * distribution.sigma)
    assert p95 == pytest.approx(ratio * mean)


def test_a_small_lognormal_never_draws_zero() -> None:
    draws = LogNormal.from_median_and_p95(1.0, 3.0).sample(np.random.default_rng(0), 1000)
    assert draws.min() == 1


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Constant(0), "at least 1 token"),
        (lambda: Uniform(0, 4), "low must be at least 1"),
        (lambda: Uniform(5, 4), "high 4 is below low 5"),
        (lambda: LogNormal.from_mean_and_p95(100, 90), "p95 90 must be above the mean 100"),
        (lambda: LogNormal.from_mean_and_p95(100, 1000), "at most 387"),
        (lambda: Empirical(np.array([], dtype=np.int64)), "at least one value"),
    ],
)
def test_impossible_lengths_are_refused(make: object, expected: str) -> None:
    assert callable(make)
    with pytest.raises(BadInputError, match=expected):
        make()


def test_a_column_of_a_file_is_a_sample(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt, answer\n10,1\n30,2\n")
    assert read_lengths(file, "prompt").values.tolist() == [10, 30]
    with pytest.raises(BadInputError, match=r"no column 'promt'; did you mean 'prompt'"):
        read_lengths(file, "promt")
    file.write_text("prompt\n10\n\n0\n")
    with pytest.raises(BadInputError, match="line 4: prompt: '0' is not a whole number"):
        read_lengths(file, "prompt")
