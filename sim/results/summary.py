"""From the records of one run to the figures of one point, as the JSON object names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tonnage.sim.domain import FloatArray, Objective
from tonnage.sim.results.records import Records
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


def request_counts(records: Records) -> dict[str, int]:
    """Return how many requests ended which way."""
    rejected = len(records.rejected)
    return {"completed": len(records) - rejected, "rejected": rejected}


def objectives_met(run: RunResult, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Return attainment and goodput over requests, and whether each quantile objective holds.

    A request meets an objective when its own figure is within the limit, whatever the quantile;
    ITL is judged on the distribution of all gaps. Rejected requests meet nothing.
    """
    if not objectives or not len(run.records):
        return {}
    records = run.records
    per_request = {
        "ttft": records.ttft_s(),
        "tpot": np.nan_to_num(records.tpot_s()),  # one token only: no further token to be late
        "e2e": records.e2e_s(),
    }
    served = records.served()
    met = served
    holds: dict[str, bool] = {}
    for objective in objectives:
        name = f"{objective.metric}_p{objective.quantile * 100:g}"
        if objective.metric == "itl":
            holds[name] = run.gaps.share_at_most(objective.limit_s) >= objective.quantile
            continue
        within = served & (per_request[objective.metric] <= objective.limit_s)
        holds[name] = float(within.mean()) >= objective.quantile
        met = met & within
    outputs = float(records.integers("output_tokens")[met].sum())
    goodput = {"goodput_output_tokens_per_s": outputs / run.makespan_s} if run.makespan_s else {}
    return {"attainment": float(met.mean()), **goodput, "holds": holds}


def cost(
    gpu_hour_usd: float, gpus: int, decode_gpus: int, figures: dict[str, float | None]
) -> dict[str, float]:
    """Return the fleet's price per hour and per million output tokens.

    All of the fleet's cost is charged to output tokens; the decode pool's own figure divides its
    GPUs alone by its steady rate.
    """
    usd_per_hour = gpu_hour_usd * gpus
    result = {"usd_per_hour": usd_per_hour}
    rates = {
        "usd_per_million_output_tokens": (usd_per_hour, figures.get("output_tokens_per_s")),
        "decode_pool_usd_per_million_output_tokens": (
            gpu_hour_usd * decode_gpus,
            figures.get("decode_output_tokens_per_s"),
        ),
    }
    for name, (price, per_s) in rates.items():
        if per_s:
            result[name] = price / 3600 / per_s * 1e6
    return result
