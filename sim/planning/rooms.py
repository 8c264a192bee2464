"""The queue for KV memory: requests take pages of an instance for as long as they are there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tonnage.sim.domain import FloatArray
from tonnage.sim.planning.workload import Workload

_FILLED_MOST = 0.97
_SEED = 48_611  # of the draws that say how rows of requests fill a pool
_ROWS, _IN_A_ROW = 256, 48


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Of fleets: the mean wait for pages, the chance to wait, and whether there are too few."""

    wait_s: FloatArray
    waits: FloatArray
    full: NDArray[np.bool_]


def room(
    load: Workload,
    usable_tokens: FloatArray,
    rate_per_s: FloatArray,
    before_s: FloatArray,
    per_token_s: FloatArray,
    users: FloatArray | None,
) -> Room:
    """Return how requests wait for pages; all figures are those of one pool of pages.

    A request of L tokens holds L of those usable for S seconds: `before_s`, and `per_token_s` for
    each token of its answer. The tokens held have the mean `rate E[LS]` and, as in M/G/infinity,
    the variance `rate E[L^2 S]`: as if every request had `E[L^2 S] / E[LS]` tokens (Hayward's
    approximation: Fredericks, Bell System Technical Journal 59(6), 1980). Of such ones k fit at
    once, and they wait as in M/G/k (Sakasegawa, as prompts do). Of `users` those beyond k wait.
    """
    load = load.all
    tokens = load.input_tokens + load.output_tokens
    steps = np.maximum(load.output_tokens - 1, 0)
    mean_step_s = per_token_s * load.mean(steps)
    token_s = before_s * load.mean(tokens) + per_token_s * load.mean(tokens * steps)
    square_s = before_s * load.mean(tokens**2) + per_token_s * load.mean(tokens**2 * steps)
    fit = np.maximum(usable_tokens * token_s / np.maximum(square_s, 1e-12), 1.0)
    filled = rate_per_s * token_s / np.maximum(usable_tokens, 1.0)
    bounded = np.minimum(filled, _FILLED_MOST)
    hold_s = before_s + mean_step_s
    squared_s = before_s**2 + 2 * before_s * mean_step_s + per_token_s**2 * load.mean(steps**2)
    burst = (load.arrival_variation + squared_s / np.maximum(hold_s, 1e-12) ** 2 - 1) / 2
    waits = bounded ** (np.sqrt(2 * (fit + 1)) - 1)
    queue = burst * waits * bounded / (1 - bounded)
    full = filled >= _FILLED_MOST
    if users is not None:
        most = np.maximum(users - np.floor(usable_tokens / load.mean(tokens) + 1e-6), 0.0)
        queue, waits = np.minimum(queue, most), np.where(most > 0, waits, 0.0)
        full &= most > 0
    return Room(queue / np.maximum(rate_per_s, 1e-12), waits, full)


def usable(load: Workload, capacity_tokens: FloatArray) -> FloatArray:
    """Return the tokens of a pool of pages that requests, one after the other, really fill.

    The first that does not fit keeps what is left empty, and those behind it wait too. Of requests
    laid out in a row the mean of what lies before the end of the pool, by drawn rows; where the
    pool holds too many for that, the mean age of a renewal is left: `E[L^2] / 2 E[L]`.
    """
    load = load.all
    tokens = load.input_tokens + load.output_tokens
    rng = np.random.default_rng(_SEED)
    drawn = rng.choice(tokens, size=(_ROWS, _IN_A_ROW), p=load.weights)
    ends = np.cumsum(drawn, axis=1)
    most = float(ends[:, -1].min())
    left_tokens = load.mean(tokens**2) / load.mean(tokens) / 2
    sizes, which = np.unique(capacity_tokens, return_inverse=True)
    found = [
        float(np.where(ends <= one, ends, 0.0).max(axis=1).mean())
        if one < most
        else one - left_tokens
        for one in sizes.tolist()
    ]
    return np.asarray(found, dtype=np.float64)[np.ravel(which)]
