"""What prompts meet at one pool configuration with so many instances: hits, service, moments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import FloatArray
from tonnage.sim.planning.candidates import PoolOption, RouterOption
from tonnage.sim.planning.workload import Workload

_SEED = 20_177  # of the draws that a router without memory makes
_NOMINAL_S = 5.0  # of an answer, where only the pace of returns depends on it
_RUNNING_LEAST = 0.1  # of a colocated pool that is left to prefixes, at least


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Prompts of a workload at one pool: `[2 x requests]`, each as a hit and as a miss.

    `weights` sum to 1. `alone_s`: what each takes when it meets nobody. `mean_s` and `shared_s`:
    means of an instance without and with a queue, so that `servers / shared_s` is the most it does.
    A request that goes to where its prefix lies waits there: what others are idle does not help it.
    """

    weights: FloatArray
    alone_s: FloatArray
    tail_tokens: FloatArray  # computed, hence sent last
    mean_s: float
    shared_s: float
    variation: float  # squared coefficient of the service
    servers: int
    side_by_side: int  # servers that take what waits in one queue
    hit_share: float  # of the prompt tokens


def prompt_row(
    option: PoolOption, instances: int, router: RouterOption, workload: Workload
) -> PromptRow:
    """Return the prompts of a workload at so many instances behind a router."""
    times = option.prompt
    assert times is not None
    returns = router.returns or instances == 1
    caches = instances * times.ranks
    returns = returns and times.ranks == 1
    hits = _hit_probability(option, caches, instances, workload, returns=returns)
    stale = 0.0 if returns else (caches - 1) * _growth(workload)
    cached = np.maximum(workload.cached_tokens - stale, 0.0)
    fresh = workload.input_tokens - cached
    hit_s, miss_s = times.alone(fresh, cached), times.alone(workload.input_tokens, 0.0 * fresh)
    each = workload.weights
    if each is None:
        each = np.full(len(fresh), 1 / len(fresh))
    weights = np.concatenate([hits * each, (1 - hits) * each])
    alone_s = np.concatenate([hit_s, miss_s])
    shared = np.concatenate(
        [times.shared(fresh, cached), times.shared(workload.input_tokens, 0.0 * fresh)]
    )
    mean_s = float(weights @ alone_s)
    variance = max(float(weights @ alone_s**2) - mean_s**2, 0.0)
    return PromptRow(
        weights,
        alone_s,
        np.concatenate([fresh, workload.input_tokens]),
        mean_s,
        min(float(weights @ shared), mean_s),
        variance / mean_s**2,
        caches,
        times.ranks if router.returns else caches,
        hits * workload.mean(cached) / workload.mean(workload.input_tokens),
    )


def _growth(workload: Workload) -> float:
    """Return the tokens that a context grows by between two requests."""
    known = workload.cached_tokens > 0
    if not known.any():
        return 0.0
    new = workload.input_tokens + workload.output_tokens - workload.cached_tokens
    return float(np.median(new[known]))


def _hit_probability(
    option: PoolOption, caches: int, instances: int, workload: Workload, *, returns: bool
) -> float:
    """Return how often a prefix is still there when it is asked for again.

    Che's approximation (Che, Tung and Wang, IEEE JSAC 20(7), 2002): a cache keeps what was used in
    the last T seconds, T such that what all contexts then take fills it.
    """
    again = np.isfinite(workload.reuse_s)
    if not again.any() or not workload.cached_tokens.any():
        return 0.0
    share = workload.mean(again.astype(np.float64))
    rate_per_s = workload.rate_per_s or (workload.users or 1) / (workload.think_s + _NOMINAL_S)
    reuse_s = workload.reuse_s + _NOMINAL_S
    if not returns and caches > 1:
        reuse_s = _revisits_s(workload, caches)
    held = workload.input_tokens + workload.output_tokens
    capacity = _cache_tokens(option, instances, rate_per_s, workload) / caches
    per_cache = rate_per_s / caches

    def resident(reach_s: float) -> float:
        return per_cache * workload.mean(held * np.minimum(reuse_s, reach_s))

    low, high = 0.0, 1e9
    if resident(high) <= capacity:
        return workload.mean((np.isfinite(reuse_s) & again).astype(np.float64)) / share
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if resident(middle) <= capacity else (low, middle)
    return workload.mean(((reuse_s <= low) & again).astype(np.float64)) / share


def _cache_tokens(
    option: PoolOption, instances: int, rate_per_s: float, workload: Workload
) -> float:
    """Return the tokens of all caches of the pool, less what running requests hold."""
    total = float(instances * option.kv_tokens)
    assert option.prompt is not None
    if option.decode is not None:
        steps = workload.decode_steps / option.decode.tokens_per_step
        running = rate_per_s * steps * float(option.decode.step_s[3]) * workload.held_tokens
        total = max(total - running, _RUNNING_LEAST * total)
    return total + instances * option.host_tokens


def _revisits_s(workload: Workload, caches: int) -> FloatArray:
    """Return when a context comes back to the same one of several caches, chosen at random.

    After a geometric number of its requests; a sum of that many intervals.
    """
    reuse_s = workload.reuse_s + _NOMINAL_S
    rng = np.random.default_rng(_SEED)
    visits = np.minimum(rng.geometric(1 / caches, len(reuse_s)), 8 * caches)
    finite = reuse_s[np.isfinite(reuse_s)]
    lasting = len(finite) / len(reuse_s)  # requests after which there is another
    drawn = finite[rng.integers(0, len(finite), (len(reuse_s), int(visits.max())))]
    between = np.arange(drawn.shape[1]) < (visits - 1)[:, None]
    later = np.where(between, drawn, 0.0).sum(axis=1)
    ended = rng.random(len(reuse_s)) > lasting ** (visits - 1)
    return np.where(ended, np.inf, reuse_s + later)
