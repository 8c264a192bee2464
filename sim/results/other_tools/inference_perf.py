"""Results of inference-perf: `stage_N_lifecycle_metrics.json`, or the summary of all stages.

Its `time_per_output_token` is (last - first token) / (output tokens - 1): TPOT here. Its
`normalized_time_per_output_token` is the whole latency over the output tokens, the wait for the
first one included: not taken. `inter_token_latency` pools gaps. All in seconds.
Shape: kubernetes-sigs/inference-perf `docs/reports.md`, `inference_perf/reportgen/base.py`.
"""

from __future__ import annotations

from tonnage.sim.results.other_tools.json_fields import Fields
from tonnage.sim.results.other_tools.measured import STATISTICS, MeasuredPoint

_LATENCIES = {
    "ttft_s": "time_to_first_token",
    "tpot_s": "time_per_output_token",
    "itl_s": "inter_token_latency",
    "e2e_s": "request_latency",
}
_NOTE = "TPOT: its time_per_output_token; its normalized one includes the wait for the first token"


def is_inference_perf(fields: Fields) -> bool:
    """Tell whether an object is a lifecycle report of inference-perf."""
    return fields.has("successes") and (fields.has("load_summary") or fields.has("failures"))


def inference_perf_point(fields: Fields) -> MeasuredPoint:
    """Return the load of one report; one that did not stream has no TTFT and is refused."""
    successes, load = fields.section("successes"), fields.optional_section("load_summary")
    latency = successes.section("latency")
    rate = successes.section("throughput")
    figures = {"throughput.output_tokens_per_s": rate.number("output_tokens_per_sec")}
    for name, key in _LATENCIES.items():
        if name == "itl_s" and not latency.has(key):
            continue
        figures |= _latency(latency.section(key), name)
    concurrency = load.whole("concurrency")
    return MeasuredPoint(
        tool="inference-perf",
        concurrency=concurrency,
        rate_per_s=None if concurrency is not None else load.optional("requested_rate"),
        figures=figures,
        completed=successes.whole("count"),
        failed=fields.optional_section("failures").whole("count"),
        input_tokens=successes.optional_section("prompt_len").optional("mean"),
        output_tokens=successes.optional_section("output_len").optional("mean"),
        notes=(_NOTE,),
    )


def _latency(summary: Fields, name: str) -> dict[str, float]:
    found = {f"latency.{name}.mean": summary.number("mean")}
    for statistic in STATISTICS[1:]:
        value = summary.optional("median" if statistic == "p50" else statistic)
        if value is not None:
            found[f"latency.{name}.{statistic}"] = value
    return found
