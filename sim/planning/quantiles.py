"""Quantiles of what is served after waits by chance, thousands of fleets at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from tonnage.sim.domain import FloatArray

_ROUNDS = 16
_MEANS = 8.0  # of a wait, beyond which no quantile is looked for
_DEVIATIONS = 12.0


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Of fleets: the chance of having to wait at all, and the mean wait of everybody."""

    chance: FloatArray
    mean_s: FloatArray

    @property
    def waiting_s(self) -> FloatArray:
        """The mean wait of those that wait."""
        return np.maximum(self.mean_s / np.maximum(self.chance, 1e-12), 1e-9)


def waiting_quantile(
    quantile: float, served_s: FloatArray, weights: FloatArray, waits: Sequence[Wait]
) -> FloatArray:
    """Return the quantile `[fleets]` of service `[fleets, requests]` after waits.

    Waits are exponential, each by its own chance; the longest counts, as two are seldom met. Single
    precision: the sums are over a hundred requests, and exponentials are most of the work.
    """
    low = served_s.min(axis=1)
    high = served_s.max(axis=1) + _MEANS * sum(wait.waiting_s for wait in waits)
    served_s, weights = served_s.astype(np.float32), weights.astype(np.float32)
    terms = [
        (wait.chance.astype(np.float32)[:, None], wait.waiting_s.astype(np.float32)[:, None])
        for wait in waits
    ]
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        left_s = middle[:, None].astype(np.float32) - served_s
        on_time = np.where(left_s < 0, np.float32(0), weights)
        left_s = np.maximum(left_s, 0)
        for chance, mean_s in terms:
            on_time *= 1 - chance * np.exp(-left_s / mean_s)
        over = on_time.sum(axis=1) < quantile
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return np.asarray(high, dtype=np.float64)


def wavering_quantile(quantile: float, mean: FloatArray, deviation: FloatArray) -> FloatArray:
    """Return the quantile `[fleets]` of normal figures of sorts `[sorts]`, all as likely."""
    low, high = np.zeros(len(deviation)), (mean + _DEVIATIONS * deviation).max(axis=1)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        over = ndtr((middle[:, None] - mean) / deviation).mean(axis=1) < quantile
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return np.asarray(high)
