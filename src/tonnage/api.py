"""The verbs as functions, and the only place where scenarios, models and the engine meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tonnage.assumptions import assumptions_of
from tonnage.explain import StepShape, add_rate_interval, explain_steps
from tonnage.handoff import handoff_figures
from tonnage.n_plus_one import check_pools
from tonnage.point_figures import point_figures
from tonnage.point_runs import Bench
from tonnage.point_runs import Progress as Progress
from tonnage.pools import (
    BuiltPool,
    built_pools,
    deployment_of,
    numbered,
    times_of,
    token_role,
)
from tonnage.scenarios.prices import price_of
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.estimate import Source
from tonnage.sim.cost.operator_times import weakest
from tonnage.sim.cost.profile import Profile
from tonnage.sim.domain import BadInputError
from tonnage.sim.model.memory import max_concurrency
from tonnage.sim.planning.load_search import LoadAxis
from tonnage.sim.planning.verdict import Capacity
from tonnage.sim.results.attempts import AttemptLog, OutageLog
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.traffic.build import session_totals
from tonnage.sim.traffic.spec import TrafficSpec
from tonnage.sim.traffic.traces import read_trace
from tonnage.step_times import StepTimes

if TYPE_CHECKING:
    from tonnage.calibrate.own import Calibrated
    from tonnage.planner import PlanReport

_EXPLAINED_REQUESTS = 32  # where a scenario names no concurrency


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What fits, by pool."""

    scenario: Scenario
    pools: dict[Role, dict[str, Any]]
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the `memory` verb."""
        return {
            "scenario": self.scenario.resolved(),
            "provenance": _provenance(self.scenario, self.assumptions),
            "memory": self.pools,
        }


@dataclass(frozen=True, slots=True)
class PointReport:
    """One point of the load: its figures, one row per request, and what instances did when.

    `attempts`, `outages`: of the first replication; None where clients try once and all is well.
    """

    figures: dict[str, Any]
    records: pd.DataFrame
    timeline: Timeline | None = None
    attempts: AttemptLog | None = None
    outages: OutageLog | None = None


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What fits, what bounds the load, and every point simulated.

    `labels` and `capacity_pages`: name and KV pages of every instance by its number in a timeline.
    """

    memory: MemoryReport
    ceilings: dict[str, Any]
    points: tuple[PointReport, ...]
    provenance: dict[str, Any]
    labels: dict[int, str]
    capacity_pages: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the `simulate` verb."""
        return self.memory.to_dict() | {
            "provenance": self.provenance,
            "ceilings": self.ceilings,
            "points": [point.figures for point in self.points],
        }


def memory(scenario: Scenario) -> MemoryReport:
    """Work out what fits on the GPUs of every pool.

    Raises BadInputError for a layout the model cannot have, InfeasibleError for what does not fit.
    """
    pools = built_pools(scenario)
    return _memory_report(scenario, pools, _offered(scenario.traffic_spec()).tokens_per_request)


def explain(
    scenario: Scenario,
    *,
    requests: int | None = None,
    context_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> dict[str, Any]:
    """Return where the time of a decode and a prefill step of every pool goes, by operator.

    What is not given comes from the scenario: its most concurrent requests, their prompt and half
    their answer, its mean prompt. Raises as `memory` does.
    """
    traffic = scenario.traffic_spec()
    report = memory(scenario)
    means = _mean_lengths(traffic)
    most = min(max(traffic.concurrency, default=_EXPLAINED_REQUESTS), _memory_most(report))
    shape = StepShape(
        most if requests is None else requests,
        means[0] + means[1] // 2 if context_tokens is None else context_tokens,
        means[0] if prompt_tokens is None else prompt_tokens,
    )
    pools = built_pools(scenario)
    times = times_of(scenario, pools)
    explained: dict[str, Any] = {"steps": explain_steps(pools, times, shape)}
    handoff = deployment_of(scenario, pools, times).handoff
    if handoff is not None:
        explained["handoff"] = handoff_figures(handoff, shape.prompt_tokens)
    assumptions = (*report.assumptions, *_step_assumptions(times))
    provenance = _provenance(scenario, assumptions, times)
    return report.to_dict() | {"provenance": provenance} | explained


def _memory_most(report: MemoryReport) -> int:
    """Return the requests that the pool which generates holds at once, one at least."""
    holding = [figures for role, figures in report.pools.items() if role != "prefill"]
    return max(1, *(int(figures["max_concurrency"]) for figures in holding))


def _mean_lengths(traffic: TrafficSpec) -> tuple[int, int]:
    """Return the mean prompt and answer in tokens; a trace is read for it."""
    if traffic.trace is None:
        inputs, outputs = traffic.input_tokens.mean(), traffic.output_tokens.mean()
    else:
        pairs = [(one.input_tokens, one.output_tokens) for one in read_trace(traffic.trace)]
        inputs, outputs = np.mean(pairs, axis=0).tolist()
    return max(1, round(inputs)), max(1, round(outputs))


def simulate(
    scenario: Scenario,
    *,
    exact: bool = False,
    replications: int = 1,
    ceiling: bool = False,
    progress: Progress | None = None,
    timeline: bool = False,
    times: dict[Role, StepTimes] | None = None,
) -> SimulationReport:
    """Simulate every point of a scenario; the same seed gives the same result.

    `exact` steps token by token, slower and to the same figures. `replications` repeats each point
    with the seeds that follow and reports means. `ceiling` tries further loads for the largest that
    meets the objectives. `timeline` keeps what every instance did when (the first of replications).
    `times`: what predicts the steps of each pool, in place of the scenario's profile. Raises as
    `memory` does.
    """
    if replications < 1:
        raise BadInputError(f"replications: {replications}; write 1 or more")
    price_of(scenario)  # a GPU without a price is told before the work
    pools = built_pools(scenario)
    traffic = scenario.traffic_spec()
    offered = _offered(traffic)
    tokens = offered.tokens_per_request
    times = times or times_of(scenario, pools)
    deployment = deployment_of(scenario, pools, times)
    bench = Bench(
        deployment=deployment,
        axis=LoadAxis(traffic, _capacity(traffic, pools, tokens), offered.rate_per_s),
        objectives=scenario.objectives(),
        requests=offered.requests,
        seeds=range(scenario.seed, scenario.seed + replications),
        exact=exact,
        progress=progress,
    )
    points, verdicts = [], []
    for point in traffic.points():
        drawn = Timeline() if timeline else None
        runs = bench.runs(point, drawn)
        figures = [point_figures(scenario, pools, point, run) for run in runs]
        combined = bench.combined(figures, runs)
        if traffic.kind == "resident":
            add_rate_interval(combined, times["decode"].executor, traffic)
        frame = _frame(runs, bench.seeds)
        points.append(PointReport(combined, frame, drawn, runs[0].attempts, runs[0].outages))
        verdicts.append(bench.verdict(runs))
    assumptions = (*assumptions_of(scenario, pools), *_step_assumptions(times))
    return SimulationReport(
        _memory_report(scenario, pools, tokens),
        bench.ceilings(traffic.points(), verdicts, search=ceiling),
        tuple(points),
        _provenance(scenario, assumptions, times),
        *numbered(deployment, runs[0]),
    )


def ceiling(scenario: Scenario, *, progress: Progress | None = None) -> dict[str, Any]:
    """Return the `ceilings` of a scenario: what memory holds, what meets the objectives.

    Simulates the points of the scenario and others around them; raises as `memory` does.
    """
    return simulate(scenario, ceiling=True, progress=progress).ceilings


def plan(
    scenario: Scenario,
    *,
    workers: int | None = None,
    rank: int = 0,
    compare: bool = False,
    what_ifs: bool = False,
    progress: Progress | None = None,
) -> PlanReport:
    """Return the cheapest fleet that meets the objectives; the same seed gives the same plan.

    `workers`: processes that simulate, two by default; 1 is this one. `rank`: so many of the best
    screened fleets are simulated too, to compare the orders; `compare`: so are the cheapest with
    another format in one pool; `what_ifs`: so is the plan with instances down, and more. Raises
    BadInputError without objectives or prices, InfeasibleError where nothing within `plan.max_gpus`
    meets them.
    """
    from tonnage import planner  # composes what stands here, and more

    return planner.plan(
        scenario,
        workers=workers,
        rank=rank,
        compare=compare,
        what_ifs=what_ifs,
        progress=progress,
    )


def n_plus_one(scenario: Scenario, *, progress: Progress | None = None) -> dict[str, Any]:
    """Return whether the objectives still hold with one instance of a pool down, by pool.

    Raises BadInputError where there are no objectives, else as `memory` does.
    """

    def simulated(without: Scenario, label: str) -> list[dict[str, Any]]:
        tell = None
        if progress is not None:
            tell = _labelled(progress, label)
        return [point.figures for point in simulate(without, progress=tell).points]

    return check_pools(scenario, simulated)


def _labelled(progress: Progress, label: str) -> Progress:
    return lambda what, share: progress(f"{label}, {what}", share)


def import_profile(gpu: str, engine: str, *, progress: Progress | None = None) -> Profile:
    """Make a profile from the kernel timings of the installed aiconfigurator-core; takes minutes.

    Raises BadInputError where that package, or its data for GPU and engine, is missing.
    """
    from tonnage.calibrate.build import build_profile  # the readers and the optimiser are heavy

    return build_profile(gpu, engine, progress=progress)


def calibrate(
    device: str | None = None,
    models: Sequence[str] = (),
    *,
    quick: bool = False,
    threads: int = 1,
    gpu: str | None = None,
    out: Path | None = None,
    fresh: bool = False,
    ranks: int | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Calibrated:
    """Measure this machine's kernels, and write a profile of it where `profile: auto` finds it.

    `device`: cpu, cuda or cuda:1; `models`: scenarios or models, as in `calibrate.wanted`; the
    rest as in `calibrate.own.Calibration`. Raises BadInputError where torch or the device is
    missing.
    """
    from tonnage.calibrate import own  # heavy, and needs torch

    asked = own.Calibration(
        device,
        own.split_names(models),
        quick,
        threads,
        gpu,
        out=out,
        fresh=fresh,
        ranks=ranks,
        budget_s=budget_s,
    )
    return own.calibrate(asked, progress)


# --- reports ------------------------------------------------------------------------------------


def _memory_report(scenario: Scenario, pools: dict[Role, BuiltPool], tokens: int) -> MemoryReport:
    figures = {role: _memory_figures(pool, tokens) for role, pool in pools.items()}
    return MemoryReport(scenario, figures, assumptions_of(scenario, pools))


def _memory_figures(pool: BuiltPool, tokens_per_request: int) -> dict[str, Any]:
    fitted = pool.memory
    return {
        "gpu": fitted.gpu,
        "gpus": pool.spec.gpus,
        "gpu_memory_bytes": fitted.gpu_memory_bytes,
        "checkpoint_bytes_per_gpu": fitted.checkpoint_bytes_per_gpu,
        "weights_bytes_per_gpu": fitted.weights_bytes_per_gpu,
        "draft_weights_bytes_per_gpu": fitted.draft_weights_bytes_per_gpu,
        "weights_by_role": {role.value: size for role, size in fitted.weights_by_role.items()},
        "replicated_bytes_by_role": dict(fitted.replicated_bytes_per_gpu),
        "activation_bytes_per_gpu": fitted.activation_bytes,
        "graph_bytes_per_gpu": fitted.graph_bytes,
        "reserved_bytes_per_gpu": fitted.other_bytes,
        "kv_bytes_per_gpu": fitted.kv_bytes_per_gpu,
        "kv_bytes_per_token": fitted.kv_bytes_per_token,
        "kv_tokens": fitted.kv_tokens,
        "kv_tokens_per_rank": fitted.kv_tokens_per_rank,
        "longest_request_tokens": fitted.longest_request_tokens,
        "tokens_per_request": tokens_per_request,
        "max_concurrency": _instance_concurrency(pool, tokens_per_request),
        "max_running_requests": pool.spec.max_running_requests,
        "page_tokens": pool.spec.page_tokens,
        "mem_fraction": fitted.mem_fraction,
        "mem_fraction_source": fitted.mem_fraction_source,
    }


def _instance_concurrency(pool: BuiltPool, tokens: int) -> int:
    """Return the requests of that length that one instance runs at once."""
    return min(max_concurrency(pool.memory, tokens), pool.spec.max_running_requests)


def _capacity(traffic: TrafficSpec, pools: dict[Role, BuiltPool], tokens: int) -> Capacity:
    """Return how many requests of that length the pool that generates holds at once, and why."""
    pool = pools[token_role(pools)]
    instances = 1 if traffic.kind == "resident" else pool.spec.instances
    in_memory = max_concurrency(pool.memory, tokens) <= pool.spec.max_running_requests
    limited_by = "memory" if in_memory else "max_running_requests"
    return Capacity(instances * _instance_concurrency(pool, tokens), limited_by)


def _frame(runs: list[RunResult], seeds: range) -> pd.DataFrame:
    """Return one row per request; with several runs a column tells the seed."""
    if len(runs) == 1:
        return runs[0].records.frame()
    frames = [run.records.frame() for run in runs]
    for seed, frame in zip(seeds, frames, strict=True):
        frame.insert(0, "seed", seed)
    return pd.concat(frames, ignore_index=True)


def _provenance(
    scenario: Scenario, assumptions: tuple[str, ...], times: dict[Role, StepTimes] | None = None
) -> dict[str, Any]:
    """Say where figures come from; `source` is the weakest of the pools' step times."""
    known = times or {}
    profiles = dict.fromkeys(one.profile for one in known.values())
    sources: list[Source] = [one.source for one in known.values()]
    return {
        "profile": ", ".join(profiles) or "datasheet",
        "source": weakest(sources),
        "version": version("tonnage"),
        "seed": scenario.seed,
        "assumptions": list(assumptions),
    }


def _step_assumptions(times: dict[Role, StepTimes]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for one in times.values() for text in one.assumptions))


@dataclass(frozen=True, slots=True)
class _Offered:
    """How many requests a point offers, and the mean tokens that one holds when it ends.

    `rate_per_s` is a trace's mean rate of arrival, None where it has no span.
    """

    requests: int
    tokens_per_request: int
    rate_per_s: float | None = None


def _offered(traffic: TrafficSpec) -> _Offered:
    """Count and average what is offered; a trace is read for it, sessions are drawn."""
    if traffic.sessions is not None:
        requests, tokens = session_totals(traffic)
        return _Offered(requests, max(1, round(tokens)))
    if traffic.trace is None:
        mean = traffic.input_tokens.mean() + traffic.output_tokens.mean()
        return _Offered(traffic.requests, max(1, round(mean) - 1))
    totals, last_s = [], 0.0
    for request in read_trace(traffic.trace):
        totals.append(request.total_tokens)
        last_s = request.arrival_s
    rate_per_s = len(totals) / last_s if last_s else None
    return _Offered(len(totals), max(1, round(float(np.mean(totals)))), rate_per_s)
