"""How many instances are worth trying, and in which order fleets are looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tonnage.sim.domain import FloatArray, IntArray, Objective
from tonnage.sim.planning.candidates import PoolOption
from tonnage.sim.planning.pool_model import BATCHES
from tonnage.sim.planning.screen import Screened
from tonnage.sim.planning.workload import Workload

_BUSY_MOST = 0.97
_UNLIMITED_S = {"ttft": 60.0, "tpot": 1.0}  # where no objective says how slow a fleet may be
_FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)  # of the fewest instances, beside one and two more
_SAME_USD = 1e-6  # relative: prices that differ by less are one price


def lowest_rate(workload: Workload, objectives: Sequence[Objective]) -> float:
    """Return the requests per second of the slowest fleet that meets the objectives.

    A closed load asks for less of a slow fleet; an open one does not care.
    """
    if workload.rate_per_s is not None:
        return workload.rate_per_s
    limits = dict(_UNLIMITED_S)
    for one in objectives:
        name = "tpot" if one.metric == "itl" else one.metric
        if name in limits:
            limits[name] = min(limits[name], one.limit_s)
    answer_s = limits["ttft"] + workload.decode_steps * limits["tpot"]
    return (workload.users or 1) / (workload.think_s + answer_s)


def counts(option: PoolOption, workload: Workload, rate: float, max_gpus: int) -> tuple[int, ...]:
    """Return the numbers of instances to try: the fewest that could do it, and more."""
    most, least = max_gpus // option.gpus, fewest(option, workload, rate)
    tried = {least + 1, least + 2, *(math.ceil(least * one) for one in _FACTORS)}
    return tuple(sorted(count for count in tried if count <= most))


def fewest(option: PoolOption, workload: Workload, rate: float) -> int:
    """Return the instances below which the load cannot be done."""
    return max(1, math.ceil(_busy(option, workload, rate) / _BUSY_MOST))


def _busy(option: PoolOption, workload: Workload, rate: float) -> float:
    """Return how many instances the work keeps busy when every prefix is found."""
    busy = 0.0
    if option.prompt is not None:
        fresh = workload.input_tokens - workload.cached_tokens
        shared_s = option.prompt.shared(fresh, workload.cached_tokens)
        busy += rate * workload.mean(shared_s) / option.prompt.ranks
    if option.decode is not None:
        batches = BATCHES[: max(1, int(np.searchsorted(BATCHES, option.concurrency, "right")))]
        steps_s = option.decode.step_s[: len(batches)]
        steps = workload.decode_steps / option.decode.tokens_per_step
        busy += rate * steps / float((batches / steps_s).max())
    return busy


def looked_at(usd_per_hour: FloatArray, most: int) -> IntArray:
    """Return the fleets to screen: the cheapest, and some of all others for the front."""
    order = np.argsort(usd_per_hour, kind="stable")
    if len(order) <= most:
        return order
    cheap = order[: most * 2 // 3]
    rest = order[most * 2 // 3 :]
    spread = np.unique(np.linspace(0, len(rest) - 1, most - len(cheap)).astype(np.int64))
    return np.concatenate([cheap, rest[spread]])


def price_order(screened: Sequence[Screened]) -> list[tuple[int, int]]:
    """Return (table, row) of every fleet that does its load: by price, what tokens cost, margin."""
    tables, rows, usd, token_usd, worst = [], [], [], [], []
    for index, one in enumerate(screened):
        usable = np.flatnonzero(np.isfinite(one.worst))
        tables.append(np.full(len(usable), index))
        rows.append(usable)
        usd.append(one.fleets.usd_per_hour[usable])
        token_usd.append(one.usd_per_million_output_tokens[usable])
        worst.append(one.worst[usable])
    if not tables:
        return []
    usd_all, token_all = np.concatenate(usd), np.concatenate(token_usd)
    # Rounding keeps what is equal but for the last digits together, so that the margin decides.
    keys = (np.concatenate(worst), _rounded(token_all), _rounded(usd_all))
    order = np.lexsort(keys)
    table, row = np.concatenate(tables)[order], np.concatenate(rows)[order]
    return list(zip(table.tolist(), row.tolist(), strict=True))


def _rounded(usd: FloatArray) -> FloatArray:
    return np.asarray(np.round(np.log(np.maximum(usd, 1e-12)) / _SAME_USD / 10))
