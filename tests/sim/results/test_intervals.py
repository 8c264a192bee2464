"""Intervals against processes whose mean and quantiles are known: how often do they hold them?

Each experiment repeats a seeded run 400 times, so a coverage of 95 % is seen with a standard error
of 1.1 points: bounds of 91 % and 98.5 % are off by more than three of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import ndtri

from tonnage.sim.domain import BadInputError, FloatArray
from tonnage.sim.results.intervals import (
    Interval,
    batch_means_interval,
    ratio_interval,
    replication_interval,
    steady_part,
    warm_up_cut,
)

RUNS = 400
AS_PROMISED = (0.91, 0.985)  # of intervals of 95 %


def autoregression(runs: int, count: int, memory: float, seed: int = 0) -> FloatArray:
    """Return stationary first-order autoregressions `[runs, count]` around 0 with variance 1."""
    noise = np.random.default_rng(seed).standard_normal((runs, count))
    noise[:, 1:] *= math.sqrt(1 - memory**2)
    for index in range(1, count):
        noise[:, index] += memory * noise[:, index - 1]
    return noise


def exponential(runs: int, count: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).exponential(1.0, (runs, count))


def with_a_full_queue_at_first(runs: FloatArray) -> FloatArray:
    """Add what 64 users who start together wait for: 32 s, falling to nothing."""
    runs = runs.copy()
    runs[:, :64] += np.linspace(32.0, 0.0, 64)
    return runs


def coverage(
    runs: FloatArray, truth: float, interval_of: Callable[[FloatArray], Interval | None]
) -> float:
    intervals = [interval_of(run) for run in runs]
    return sum(found is not None and found[0] <= truth <= found[1] for found in intervals) / len(
        runs
    )


def as_if_independent(run: FloatArray) -> Interval:
    half_width = 1.96 * float(run.std(ddof=1)) / math.sqrt(len(run))
    return float(run.mean()) - half_width, float(run.mean()) + half_width


# --- warm-up ------------------------------------------------------------------------------------


def mser_5_by_its_definition(values: list[float]) -> int:
    batches = [sum(values[at : at + 5]) / 5 for at in range(0, len(values) // 5 * 5, 5)]
    errors = []
    for cut in range(len(batches) // 2 + 1):
        rest = batches[cut:]
        mean = sum(rest) / len(rest)
        errors.append(sum((value - mean) ** 2 for value in rest) / len(rest) ** 2)
    return 5 * errors.index(min(errors))


@pytest.mark.parametrize("count", [10, 43, 200])
def test_the_cut_is_the_one_of_the_definition(count: int) -> None:
    for run in with_a_full_queue_at_first(np.pad(exponential(20, count), ((0, 0), (0, 64)))):
        assert warm_up_cut(run) == mser_5_by_its_definition(run.tolist())


def test_a_beginning_that_differs_is_cut_where_it_ends() -> None:
    run = np.concatenate([np.full(50, 9.0), np.tile([0.9, 1.1, 1.0, 0.8, 1.2], 40)])
    assert warm_up_cut(run) == 50
    assert steady_part(run).tolist() == run[50:].tolist()


def test_a_run_that_never_settles_is_cut_at_its_half() -> None:
    assert warm_up_cut(np.arange(200.0)) == 100


@pytest.mark.parametrize("run", [[], [1.0], [3.0] * 9, [3.0] * 500])
def test_nothing_is_cut_from_a_short_or_constant_run(run: list[float]) -> None:
    assert warm_up_cut(np.array(run)) == 0
    assert steady_part(np.array(run)).tolist() == run


def test_steady_part_cuts_a_warm_up_and_leaves_a_burst() -> None:
    steady = autoregression(RUNS, 1000, 0.95)  # in bursts, but without a warm-up
    cut_by_mser = sum(warm_up_cut(run) > 0 for run in steady) / RUNS
    cut = sum(len(steady_part(run)) < 1000 for run in steady) / RUNS
    assert cut_by_mser > 0.3
    assert cut < 0.1
    starting_full = with_a_full_queue_at_first(exponential(RUNS, 512))
    cuts = [512 - len(steady_part(run)) for run in starting_full]
    assert min(cuts) >= 55
    assert np.median(cuts) <= 75


def test_steady_part_cuts_a_warm_up_that_is_small() -> None:
    runs = exponential(RUNS, 512)
    runs[:, :64] += 1.5
    assert sum(len(steady_part(run)) < 512 for run in runs) / RUNS > 0.9


# --- one run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory", "count"), [(0.0, 200), (0.5, 512), (0.9, 2000)])
def test_the_mean_is_inside_as_often_as_promised(memory: float, count: int) -> None:
    found = coverage(autoregression(RUNS, count, memory), 0.0, batch_means_interval)
    assert AS_PROMISED[0] <= found <= AS_PROMISED[1]


def test_taking_correlated_observations_for_independent_would_be_noticed() -> None:
    assert coverage(autoregression(RUNS, 2000, 0.9), 0.0, as_if_independent) < 0.5


@pytest.mark.parametrize("confidence", [0.5, 0.8])
def test_a_lower_confidence_holds_the_mean_less_often(confidence: float) -> None:
    runs = autoregression(RUNS, 1000, 0.5)
    found = coverage(runs, 0.0, lambda run: batch_means_interval(run, confidence))
    assert found == pytest.approx(confidence, abs=0.08)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_quantiles_are_inside_as_often_as_promised(quantile: float, memory: float) -> None:
    runs = np.exp(autoregression(RUNS, 1000, memory))  # lognormal: a tail as latencies have
    truth = math.exp(float(ndtri(quantile)))
    found = coverage(runs, truth, lambda run: batch_means_interval(run, quantile=quantile))
    assert AS_PROMISED[0] <= found <= AS_PROMISED[1]


def test_a_warm_up_hides_the_mean_until_it_is_cut() -> None:
    runs = with_a_full_queue_at_first(exponential(RUNS, 512))
    assert coverage(runs, 1.0, as_if_independent) < 0.01
    found = coverage(runs, 1.0, lambda run: batch_means_interval(steady_part(run)))
    assert 0.9 <= found <= AS_PROMISED[1]


def test_batch_means_by_hand() -> None:
    """Ten batches, +1 and -1 in turn: squares sum to 10; Student's 2.2622 at nine degrees."""
    run = np.repeat([1.0, -1.0] * 5, 10)
    half_width = 2.26216 * math.sqrt(10 / (10 * 9))
    assert batch_means_interval(run) == pytest.approx((-half_width, half_width), rel=1e-5)


def test_correlated_batches_are_merged_and_what_is_left_widens() -> None:
    """Twenty batches in groups of five become ten: 1 1 0 -1 -1 1 1 0 -1 -1.

    Their squares sum to 8 and the products of neighbours to 3: a correlation of 3/8, and 1/10 for
    its bias.
    """
    run = np.repeat([1.0, -1.0, 1.0, -1.0], 50)
    correlation = 3 / 8 + 1 / 10
    variance = (1 + correlation) / (1 - correlation) * 8 / (10 * 9)
    half_width = 2.26216 * math.sqrt(variance)
    assert batch_means_interval(run) == pytest.approx((-half_width, half_width), rel=1e-5)


def test_a_run_may_be_too_short_for_an_interval() -> None:
    runs = exponential(1, 2000)[0]
    assert batch_means_interval(runs[:99]) is None
    assert batch_means_interval(runs[:100]) is not None
    for quantile, fewest in ((0.5, 100), (0.9, 200), (0.95, 400), (0.99, 2000)):
        assert batch_means_interval(runs[: fewest - 1], quantile=quantile) is None
        assert batch_means_interval(runs[:fewest], quantile=quantile) is not None
    assert batch_means_interval(np.zeros(0)) is None


def test_a_constant_has_an_interval_without_width() -> None:
    assert batch_means_interval(np.full(500, 3.0)) == (3.0, 3.0)
    assert batch_means_interval(np.full(500, 3.0), quantile=0.95) == (3.0, 3.0)


def test_the_order_of_the_observations_matters() -> None:
    run = autoregression(1, 400, 0.97)[0]
    shuffled = np.random.default_rng(1).permutation(run)
    assert width(batch_means_interval(run)) > 2 * width(batch_means_interval(shuffled))


def width(interval: Interval | None) -> float:
    assert interval is not None
    return interval[1] - interval[0]


# --- rates and replications ---------------------------------------------------------------------


def test_a_rate_is_inside_as_often_as_promised() -> None:
    """100 tokens a request on average, one request a second, both with a coefficient of one."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(RUNS):
        tokens, gaps_s = rng.geometric(0.01, 400).astype(float), rng.exponential(1.0, 400)
        interval = ratio_interval(tokens, gaps_s)
        assert interval is not None
        assert sum(interval) / 2 == pytest.approx(tokens.sum() / gaps_s.sum())
        held += interval[0] <= 100.0 <= interval[1]
    assert AS_PROMISED[0] <= held / RUNS <= AS_PROMISED[1]


def test_a_rate_without_time_has_no_interval() -> None:
    assert ratio_interval(np.ones(200), np.zeros(200)) is None
    assert ratio_interval(np.zeros(0), np.zeros(0)) is None


def test_replications_by_hand() -> None:
    """Mean 2, standard deviation 1, Student's 4.3027 at two degrees of freedom."""
    low, high = replication_interval([1.0, 2.0, 3.0]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), rel=1e-5)
    assert replication_interval([1.0]) is None
    assert replication_interval([]) is None


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_a_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(BadInputError, match=r"confidence .* such as 0\.95"):
        replication_interval([1.0, 2.0], confidence)


def test_a_quantile_is_a_share() -> None:
    with pytest.raises(BadInputError, match="quantile 95 is not between 0 and 1"):
        batch_means_interval(np.ones(500), quantile=95)
