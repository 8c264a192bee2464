"""From the records of one run to the figures of one point, as the JSON object names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tonnage.sim.domain import FloatArray, Objective
from tonnage.sim.results.intervals import (
    Interval,
    batch_means_interval,
    ratio_interval,
    steady_part,
)
from tonnage.sim.results.records import STATUSES, Records
from tonnage.sim.results.run import RunResult
from tonnage.sim.results.sketch import QuantileSketch

_QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


def throughput(run: RunResult, gpus: int, *, resident: bool) -> dict[str, float | None]:
    """Return tokens per second of the requests that were served.

    A resident run has no beginning and no end: its rate is that of the steady state.
    """
    records, served = run.records, run.records.served()
    inputs = float(records.integers("input_tokens")[served].sum())
    outputs = float(records.integers("output_tokens")[served].sum())
    steady = run.steady_decode_tokens_per_s
    span_s = run.makespan_s
    per_s = steady if resident else (outputs / span_s if span_s else None)
    figures = {
        "output_tokens_per_s": per_s,
        "input_tokens_per_s": None if resident or not span_s else inputs / span_s,
        "output_tokens_per_s_per_gpu": None if per_s is None else per_s / gpus,
        "decode_output_tokens_per_s": steady,
    }
    if run.cache is not None and span_s:
        cached = float(records.integers("cached_tokens")[served].sum())
        figures["cached_input_tokens_per_s"] = cached / span_s
    return {name: value for name, value in figures.items() if value is not None}


def latency(run: RunResult, *, resident: bool) -> dict[str, dict[str, float]]:
    """Return mean and quantiles in seconds; a resident run has no arrival, so no TTFT or e2e."""
    records, served = run.records, run.records.served()
    figures = {"tpot_s": _spread(records.tpot_s()[served])}
    if not resident:
        figures["ttft_s"] = _spread(records.ttft_s()[served])
        figures["e2e_s"] = _spread(records.e2e_s()[served])
    figures["itl_s"] = _sketch_spread(run.gaps)
    return {name: spread for name, spread in figures.items() if spread}


def _spread(values: FloatArray) -> dict[str, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    quantiles = np.quantile(known, list(_QUANTILES.values()))
    named = dict(zip(_QUANTILES, quantiles.tolist(), strict=True))
    return {"mean": float(known.mean()), **named}


def _sketch_spread(sketch: QuantileSketch) -> dict[str, float]:
    if not sketch.count:
        return {}
    quantiles = {name: sketch.quantile(share) for name, share in _QUANTILES.items()}
    return {"mean": sketch.mean(), **quantiles}


def intervals(run: RunResult, *, resident: bool) -> dict[str, Any]:
    """Return `intervals` of 95 % by dotted name, and `warm_up_requests` by the figure cut.

    From one run. Latencies: batch means and sections of the requests in order of arrival behind
    the warm-up, so of the steady state, whereas the figures are over all requests. Output rate:
    over the whole run, as the figure. What is missing had too few requests.
    """
    records, served = run.records, run.records.served()
    order = np.argsort(records.integers("id")[served])
    found: dict[str, Interval | None] = {}
    warm_up: dict[str, int] = {}
    series = {"tpot_s": records.tpot_s()}
    if not resident:
        found["throughput.output_tokens_per_s"] = _output_rate_interval(records)
        series |= {"ttft_s": records.ttft_s(), "e2e_s": records.e2e_s()}
    for name, values in series.items():
        arrived = values[served][order]
        known = arrived[~np.isnan(arrived)]
        steady = steady_part(known)
        warm_up[f"latency.{name}"] = len(known) - len(steady)
        found[f"latency.{name}.mean"] = batch_means_interval(steady)
        for label, share in _QUANTILES.items():
            found[f"latency.{name}.{label}"] = batch_means_interval(steady, quantile=share)
    named = {name: list(interval) for name, interval in found.items() if interval is not None}
    return {"intervals": named, "warm_up_requests": warm_up}


def _output_rate_interval(records: Records) -> Interval | None:
    """Return the interval of output tokens over time, from the gaps between ends of requests."""
    served = records.served()
    finish_s = records.times("finish_s")[served]
    order = np.argsort(finish_s, kind="stable")
    gaps_s = np.diff(finish_s[order], prepend=0.0)
    outputs = records.integers("output_tokens")[served][order]
    return ratio_interval(outputs.astype(np.float64), gaps_s)


def request_counts(records: Records) -> dict[str, int]:
    """Return how many requests ended which way."""
    counts = {status: int(records.with_status(status).sum()) for status in STATUSES}
    counts["retractions"] = int(records.integers("retractions").sum())
    if records.has_attempts:
        counts["retried"] = int((records.attempts("attempts") > 1).sum())
    return counts


def wasted_tokens(records: Records) -> dict[str, int]:
    """Return the tokens that were computed and that no client was served with.

    Prompt tokens computed for requests that were not served, or computed again after a retraction;
    output tokens generated for requests that were not served; those of all attempts but the last.
    """
    served = records.served()
    computed, prompts = records.integers("computed_tokens"), records.integers("input_tokens")
    again = np.maximum(computed + records.integers("cached_tokens") - prompts, 0)
    outputs = records.integers("generated_tokens")
    return {
        "prompt_tokens": int(computed[~served].sum() + again[served].sum())
        + int(records.attempts("lost_prompt_tokens").sum()),
        "output_tokens": int(outputs[~served].sum())
        + int(records.attempts("lost_output_tokens").sum()),
    }


def attempt_figures(run: RunResult) -> dict[str, dict[str, int]]:
    """Return `attempts`, by how they ended, and `outages`; nothing where there is no log."""
    figures = {}
    if run.attempts is not None:
        figures["attempts"] = run.attempts.counts()
    if run.outages is not None:
        figures["outages"] = run.outages.figures()
    return figures


def objectives_met(run: RunResult, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Return attainment and goodput over requests, and whether each quantile objective holds.

    A request meets an objective when its own figure is within the limit, whatever the quantile;
    ITL is judged on the distribution of all gaps. Rejected requests meet nothing.
    """
    if not objectives or not len(run.records):
        return {}
    met = run.records.served()
    for objective in objectives:
        if objective.metric != "itl":
            met = met & _within(run.records, objective)
    outputs = float(run.records.integers("output_tokens")[met].sum())
    goodput = {"goodput_output_tokens_per_s": outputs / run.makespan_s} if run.makespan_s else {}
    holds = objectives_hold(objectives, [objective_shares(run, objectives)])
    return {"attainment": float(met.mean()), **goodput, "holds": holds}


def objective_name(objective: Objective) -> str:
    """Return the name a scenario gives it, such as `ttft_p95`."""
    return f"{objective.metric}_p{objective.quantile * 100:g}"


def objective_shares(run: RunResult, objectives: Sequence[Objective]) -> dict[str, float]:
    """Return the share of requests, of token gaps for ITL, within the limit of each objective."""
    return {
        objective_name(objective): run.gaps.share_at_most(objective.limit_s)
        if objective.metric == "itl"
        else float(_within(run.records, objective).mean())
        for objective in objectives
    }


def objectives_hold(
    objectives: Sequence[Objective], shares: Sequence[dict[str, float]]
) -> dict[str, bool]:
    """Return which objectives hold, given their shares in every replication."""
    names = {objective_name(objective): objective.quantile for objective in objectives}
    return {
        name: float(np.mean([share[name] for share in shares])) >= quantile
        for name, quantile in names.items()
    }


def _within(records: Records, objective: Objective) -> NDArray[np.bool_]:
    """Return the mask `[requests]` of those that were served within the limit."""
    if objective.metric == "ttft":
        values_s = records.ttft_s()
    elif objective.metric == "e2e":
        values_s = records.e2e_s()
    else:
        values_s = np.nan_to_num(records.tpot_s())  # one token only: no further one to be late
    within: NDArray[np.bool_] = records.served() & (values_s <= objective.limit_s)
    return within
