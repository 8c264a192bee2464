"""Results of guidellm: `benchmarks.json`, one benchmark per load.

Its `inter_token_latency_ms` is (last - first token) / (output tokens - 1) of a request: TPOT here.
Its `time_per_output_token_ms` counts from the request's start, the first token included: not taken.
`request_latency` is in seconds. Of each metric, the successful requests.
Shape: guidellm 0.5 and later, `guidellm/schemas/request_stats.py`, `benchmark/schemas`.
"""

from __future__ import annotations

from tonnage.sim.results.other_tools.json_fields import Fields
from tonnage.sim.results.other_tools.measured import MeasuredPoint

_LATENCIES = {  # ours: (theirs, seconds of their unit)
    "ttft_s": ("time_to_first_token_ms", 1e-3),
    "tpot_s": ("inter_token_latency_ms", 1e-3),
    "e2e_s": ("request_latency", 1.0),
}
_RATES = ("constant", "poisson", "async")
_NOTE = "TPOT: its inter_token_latency_ms; its time_per_output_token_ms includes the first token"


def is_guidellm(fields: Fields) -> bool:
    """Tell whether an object is a report of guidellm."""
    return isinstance(fields.values.get("benchmarks"), list)


def guidellm_points(fields: Fields) -> list[MeasuredPoint]:
    """Return the load of every benchmark in a report."""
    return [_point(benchmark) for benchmark in fields.sections("benchmarks")]


def _point(benchmark: Fields) -> MeasuredPoint:
    metrics = benchmark.section("metrics")
    output_rate = metrics.section("output_tokens_per_second").section("successful")
    figures = {"throughput.output_tokens_per_s": output_rate.number("mean")}
    for name, (key, unit_s) in _LATENCIES.items():
        figures |= _latency(metrics.section(key).section("successful"), name, unit_s)
    concurrency, rate_per_s = _load(benchmark.section("config").section("strategy"))
    totals = metrics.optional_section("request_totals")
    return MeasuredPoint(
        tool="guidellm",
        concurrency=concurrency,
        rate_per_s=rate_per_s,
        figures=figures,
        completed=totals.whole("successful"),
        failed=totals.whole("errored"),
        input_tokens=_mean_tokens(metrics, "prompt_token_count"),
        output_tokens=_mean_tokens(metrics, "output_token_count"),
        notes=(_NOTE,),
    )


def _latency(summary: Fields, name: str, unit_s: float) -> dict[str, float]:
    found = {f"latency.{name}.mean": summary.number("mean") * unit_s}
    percentiles = summary.optional_section("percentiles")
    for statistic in ("p50", "p90", "p95", "p99"):
        value = percentiles.optional(statistic)
        if value is not None:
            found[f"latency.{name}.{statistic}"] = value * unit_s
    return found


def _load(strategy: Fields) -> tuple[int | None, float | None]:
    kind = strategy.text("type_") or ""
    if kind == "concurrent":
        return round(strategy.number("streams")), None
    if kind == "synchronous":
        return 1, None
    if kind in _RATES:
        return None, strategy.number("rate")
    if kind == "throughput":
        return strategy.whole("max_concurrency"), None
    raise strategy.refuse("type_", f"{kind!r} is not a strategy that is known")


def _mean_tokens(metrics: Fields, name: str) -> float | None:
    return metrics.optional_section(name).optional_section("successful").optional("mean")
