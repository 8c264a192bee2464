"""Simulates a fleet under the load it is planned for: short runs in the steady state.

What comes first, an empty system with cold caches, is run and not measured; what is measured is the
window in which the load is whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tonnage.pools import built_pools, deployment_of, times_of
from tonnage.scenarios.schema import Scenario
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import BadInputError, FloatArray, Objective, Step
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.planning.fleet_plan import Estimate
from tonnage.sim.planning.stationary import StationarySessions
from tonnage.sim.results.intervals import batch_means_interval, replication_interval
from tonnage.sim.results.records import Records
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.summary import objective_name
from tonnage.sim.traffic.build import build_load, build_sessions
from tonnage.sim.traffic.loads import Load
from tonnage.sim.traffic.sessions import SessionLoad
from tonnage.sim.traffic.spec import LoadPoint, SessionSpec, TrafficSpec

_BLOCK_TOKENS = 256  # at which drawn sessions share text here: coarser, and four times as fast
_RAMP_ANSWERS = 2.0  # times of an answer until an open load has filled the system
_TAIL_ANSWERS = 1.0  # and before its last arrivals, so that what is measured ends under load
_TRACE_RAMP_SHARE, _TRACE_TAIL_SHARE = 0.2, 0.1  # of a trace, which is as long as it is
_SERVED_S = 5.0  # nominal, as in `stationary`
_TRACE_REQUESTS = 1000  # of a trace that no limit cuts, at least
_UNSERVED_S = math.inf
_FILLING_S = 1e-6  # of a step that fills caches before the run
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The load of a plan with its headroom; `requests` are measured.

    `answer_s`: about what an answer takes, of which the ramp of an open load has some. `warm_up_s`:
    what filling the caches takes, and `think_s` the mean pause, of sessions.
    """

    traffic: TrafficSpec
    point: LoadPoint
    requests: int
    answer_s: float = 0.0
    warm_up_s: float = 0.0
    think_s: float = 0.0
    session_rate_per_s: float | None = None  # at which sessions begin, where that was asked for


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one run was measured to do; latencies are quantiles in seconds, by name."""

    seed: int
    measured: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    tpot_p50_s: float
    quantiles_s: dict[str, float]
    cache_hit_share: float | None
    ends_s: dict[str, tuple[float, float]]  # intervals of the quantiles within the run


def planned_load(scenario: Scenario, requests: int) -> PlannedLoad:
    """Return the load to plan for: the last point of the traffic, or `plan.load`, and headroom."""
    traffic, plan = scenario.traffic_spec(), scenario.plan
    factor = 1.0 + plan.headroom
    point = traffic.points()[-1]
    if traffic.trace is not None:
        if plan.load is not None:
            raise BadInputError(
                f"{scenario.origin()[0]}: plan.load: a trace has its own rate; "
                "use traffic.rate_scale, or remove it"
            )
        scale = traffic.trace.rate_scale * factor
        limit = traffic.trace.limit or max(requests, _TRACE_REQUESTS)
        trace = replace(traffic.trace, rate_scale=scale, limit=limit)
        return PlannedLoad(replace(traffic, trace=trace), point, requests)
    if point.concurrency is not None:
        users = math.ceil((plan.load or point.concurrency) * factor - 1e-9)
        point = LoadPoint(concurrency=users)
        if traffic.kind == "closed":  # a set that starts, what is measured, a set that ends
            traffic = replace(traffic, requests=2 * users + max(requests, 4 * users))
    elif point.rate_per_s is not None:
        point = LoadPoint(rate_per_s=(plan.load or point.rate_per_s) * factor)
    return PlannedLoad(traffic, point, requests)


def grown(load: PlannedLoad, factor: float) -> PlannedLoad:
    """Return a load so many times as large."""
    traffic, point = load.traffic, load.point
    if traffic.trace is not None:
        trace = replace(traffic.trace, rate_scale=traffic.trace.rate_scale * factor)
        return replace(load, traffic=replace(traffic, trace=trace))
    if point.concurrency is None:
        assert point.rate_per_s is not None
        return replace(load, point=LoadPoint(rate_per_s=point.rate_per_s * factor))
    users = math.ceil(point.concurrency * factor - 1e-9)
    if traffic.kind == "closed":
        traffic = replace(traffic, requests=2 * users + max(load.requests, 4 * users))
    return replace(load, traffic=traffic, point=LoadPoint(concurrency=users))


def simulate_fleet(
    scenario: Scenario, load: PlannedLoad, objectives: Sequence[Objective], seed: int
) -> RunFigures:
    """Run a fleet, the scenario with its pools, once; picklable, so that a worker can do it."""
    pools = built_pools(scenario)
    deployment = deployment_of(scenario, pools, times_of(scenario, pools))
    offered, users = _offered(load, seed)
    if users is not None:
        assert isinstance(offered, SessionLoad)
        deployment = _filled_at_once(deployment, offered)
    run = simulate(deployment, offered, seed=seed)
    return _figures(run, _window(run.records, load, users), objectives, seed)


def _offered(load: PlannedLoad, seed: int) -> tuple[Load, int | None]:
    """Build the load of a seed; with sessions also how many users there are."""
    traffic, point = load.traffic, load.point
    if traffic.kind != "sessions":
        if point.rate_per_s is not None:
            traffic = replace(traffic, requests=sum(_open_parts(load)))
        return build_load(traffic, point, seed), None
    if isinstance(traffic.sessions, SessionSpec):
        coarse = max(traffic.sessions.block_tokens, _BLOCK_TOKENS)
        count = min(traffic.sessions.count, 200)
        sessions = replace(traffic.sessions, block_tokens=coarse, count=count)
        traffic = replace(traffic, sessions=sessions)
    users = session_users(load)
    source = build_sessions(traffic, LoadPoint(concurrency=users), seed)
    stationary = StationarySessions(source, users, session_span_s(load, users), seed)
    return SessionLoad(stationary, users, traffic.timeout_s, traffic.output_limit_tokens), users


def _open_parts(load: PlannedLoad) -> tuple[int, int, int]:
    """Return the requests of an open load that fill the system, are measured, and follow."""
    assert load.point.rate_per_s is not None
    per_answer = load.point.rate_per_s * load.answer_s
    ramp, tail = math.ceil(_RAMP_ANSWERS * per_answer), math.ceil(_TAIL_ANSWERS * per_answer)
    return max(ramp, load.requests // 10), load.requests, tail


class _Filling:
    """Predicts steps as `inner` does, but the first `tokens` of prompts take no time.

    They fill the caches before the run that is measured; to compute them would take hours of the
    simulated time for many users, all at once as no system ever does.
    """

    def __init__(self, inner: StepPredictor, tokens: int) -> None:
        self._inner = inner
        self._left = tokens

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        if self._left > 0 and step.prefill_chunks:
            self._left -= sum(chunk.new_tokens for chunk in step.prefill_chunks)
            return np.full(1, _FILLING_S)
        return self._inner.run(step, max_steps)

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step."""
        return self._inner.times(step)


def _filled_at_once(deployment: Deployment, load: SessionLoad) -> Deployment:
    """Return the deployment whose first prompts, one per user, take no time to compute."""
    tokens, seen = 0, set[int]()
    for session in load.sessions:
        turn = session.turns[0]
        fresh = sum(1 for one in turn.new_block_ids if one not in seen)
        seen.update(turn.new_block_ids)
        tokens += min(fresh * session.block_tokens, turn.input_tokens)
    role = "serve" if "serve" in deployment.pools else "prefill"
    plan = deployment.pools[role]
    predictor = cast(StepPredictor, plan.executor)  # as `times_of` built it
    filling = replace(plan, executor=_Filling(predictor, tokens))
    return replace(deployment, pools={**deployment.pools, role: filling})


def session_users(load: PlannedLoad) -> int:
    """Return the sessions under way: as asked for, or by Little's law from their rate."""
    if load.point.concurrency is not None:
        return load.point.concurrency
    assert load.point.rate_per_s is not None
    sessions = list(build_sessions(load.traffic, load.point, 0))
    lasts_s = [sum(turn.think_s + _SERVED_S for turn in one.turns) for one in sessions]
    return max(1, math.ceil(load.point.rate_per_s * float(np.mean(lasts_s))))


def session_span_s(load: PlannedLoad, users: int) -> float:
    """Return how long sessions are followed: the warm-up and the requests to be measured."""
    return load.warm_up_s + load.requests * (load.think_s + _SERVED_S) / users


def _window(records: Records, load: PlannedLoad, users: int | None) -> Mask:
    """Return the requests `[requests]` that are measured."""
    ids, arrivals_s = records.integers("id"), records.times("arrival_s")
    if users is not None:
        warm = ids < users
        ended_s = records.times("finish_s")[warm & records.served()]
        begin_s = float(ended_s.max()) if len(ended_s) else 0.0
        end_s = max(session_span_s(load, users), begin_s + 1.0)
        return np.asarray(~warm & (arrivals_s >= begin_s) & (arrivals_s <= end_s))
    total = len(ids)
    if load.point.concurrency is not None:
        users = load.point.concurrency
        return np.asarray((ids >= users) & (ids < total - users))
    if load.point.rate_per_s is not None:
        ramp, measured, _ = _open_parts(load)
        return np.asarray((ids >= ramp) & (ids < ramp + measured))
    ramp_end, tail_begin = _TRACE_RAMP_SHARE * total, (1 - _TRACE_TAIL_SHARE) * total
    return np.asarray((ids >= ramp_end) & (ids < tail_begin))


def _figures(
    run: RunResult, window: Mask, objectives: Sequence[Objective], seed: int
) -> RunFigures:
    records = run.records
    served = window & records.served()
    series = {
        "ttft": _with_unserved(records.ttft_s(), window, records),
        "tpot": _with_unserved(np.nan_to_num(records.tpot_s()), window, records),
        "e2e": _with_unserved(records.e2e_s(), window, records),
    }
    wanted = {objective_name(one): (one.metric, one.quantile) for one in objectives}
    wanted = {"ttft_p95": ("ttft", 0.95), "tpot_p95": ("tpot", 0.95), **wanted}
    quantiles, ends = {}, {}
    for name, (metric, quantile) in wanted.items():
        if metric == "itl":
            quantiles[name] = run.gaps.quantile(quantile)
            continue
        values = series[metric]
        quantiles[name] = _quantile(values, quantile)
        interval = _interval(values, quantile)
        if interval is not None:
            ends[name] = interval
    finish_s = records.times("finish_s")
    begin_s, end_s = _span(records, window)
    span_s = max(end_s - begin_s, 1e-9)
    ended = records.served() & (finish_s > begin_s) & (finish_s <= end_s)
    inputs = records.integers("input_tokens")
    cached = records.integers("cached_tokens")[served]
    prompts = float(inputs[served].sum())
    return RunFigures(
        seed=seed,
        measured=int(window.sum()),
        output_tokens_per_s=float(records.integers("output_tokens")[ended].sum()) / span_s,
        input_tokens_per_s=prompts / span_s,
        tpot_p50_s=_quantile(series["tpot"], 0.5),
        quantiles_s=quantiles,
        cache_hit_share=float(cached.sum()) / prompts if prompts and run.cache else None,
        ends_s=ends,
    )


def _with_unserved(values: FloatArray, window: Mask, records: Records) -> FloatArray:
    """Return a figure of the measured requests in order; whoever was not served waits for ever."""
    order = np.argsort(records.integers("id")[window])
    found = np.where(records.served(), values, _UNSERVED_S)[window][order]
    return np.asarray(found, dtype=np.float64)


def _quantile(values: FloatArray, quantile: float) -> float:
    if not len(values):
        return _UNSERVED_S
    return float(np.quantile(values, quantile, method="higher"))


def _interval(values: FloatArray, quantile: float) -> tuple[float, float] | None:
    if not np.isfinite(values).all():
        return None
    return batch_means_interval(values, quantile=quantile)


def _span(records: Records, window: Mask) -> tuple[float, float]:
    arrivals_s = records.times("arrival_s")[window]
    if not len(arrivals_s):
        return 0.0, 0.0
    return float(arrivals_s.min()), float(arrivals_s.max())


def estimate(runs: Sequence[RunFigures], name: str) -> Estimate:
    """Return a latency over runs: Student's interval of several, of one the interval within it."""
    values = [run.quantiles_s[name] for run in runs]
    return _estimate(values, runs[0].ends_s.get(name))


def figure(runs: Sequence[RunFigures], name: str) -> Estimate:
    """Return a rate over runs."""
    return _estimate([float(getattr(run, name)) for run in runs], None)


def _estimate(values: Sequence[float], alone: tuple[float, float] | None) -> Estimate:
    mean = float(np.mean(values))
    if not math.isfinite(mean):
        return Estimate(mean)
    interval = alone if len(values) == 1 else replication_interval(values)
    return Estimate(mean) if interval is None else Estimate(mean, *interval)
