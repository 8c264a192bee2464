"""Results of the engines' own clients: `sglang.bench_serving` (JSONL), `vllm bench serve` (JSON).

Both follow vLLM's benchmark: aggregates in milliseconds, TPOT without the first token as here
(`(latency - ttft) / (output_len - 1)`), gaps pooled over requests, `output_throughput` of output
tokens alone. `total_throughput` and `total_token_throughput` count prompts too and are not taken.
Where one chunk of a stream holds several tokens, their gaps are those of chunks.
Shapes: vllm 0.24 `vllm/benchmarks/serve.py`, sglang 0.5.23 `sglang/bench_serving.py`.
"""

from __future__ import annotations

from math import inf

import numpy as np

from tonnage.sim.results.other_tools.json_fields import Fields
from tonnage.sim.results.other_tools.measured import STATISTICS, MeasuredPoint

_QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_GAPS = "ITL: gaps between chunks of the stream, which may hold several tokens"


def is_vllm(fields: Fields) -> bool:
    """Tell whether an object is a result of `vllm bench serve`."""
    return fields.has("mean_ttft_ms") and fields.has("total_token_throughput")


def is_sglang(fields: Fields) -> bool:
    """Tell whether an object is a result of `sglang.bench_serving`."""
    return fields.has("output_throughput") and fields.has("mean_e2e_latency_ms")


def vllm_point(fields: Fields) -> MeasuredPoint:
    """Return the load of one `vllm bench serve`; E2E is there if `--percentile-metrics` asked."""
    return _point(fields, "vllm bench serve", {"e2e_s": "e2el"})


def sglang_point(fields: Fields) -> MeasuredPoint:
    """Return the load of one line of `sglang.bench_serving`."""
    return _point(fields, "sglang.bench_serving", {"e2e_s": "e2e_latency"})


def _point(fields: Fields, tool: str, names: dict[str, str]) -> MeasuredPoint:
    figures = {"throughput.output_tokens_per_s": fields.number("output_throughput")}
    names = {"ttft_s": "ttft", "tpot_s": "tpot", "itl_s": "itl", **names}
    for name, key in names.items():
        figures |= _latency(fields, name, key)
    figures = _first_token_quantiles(fields) | figures
    completed = fields.whole("completed")
    concurrency, rate_per_s = _load(fields, completed)
    return MeasuredPoint(
        tool=tool,
        concurrency=concurrency,
        rate_per_s=rate_per_s,
        figures=figures,
        completed=completed,
        failed=fields.whole("failed"),
        input_tokens=_mean(fields, "total_input_tokens", completed),
        output_tokens=_mean(fields, "total_output_tokens", completed),
        notes=(_GAPS,),
    )


def _latency(fields: Fields, name: str, key: str) -> dict[str, float]:
    found = {}
    for statistic in STATISTICS:
        prefix = "median" if statistic == "p50" else statistic
        value_ms = fields.optional(f"{prefix}_{key}_ms")
        if value_ms is not None:
            found[f"latency.{name}.{statistic}"] = value_ms / 1000
    return found


def _first_token_quantiles(fields: Fields) -> dict[str, float]:
    """Return quantiles of the detailed times (seconds; 0 where a request failed), if written."""
    times_s = fields.values.get("ttfts")
    if not isinstance(times_s, list) or not times_s:
        return {}
    served = [time for time in times_s if isinstance(time, int | float) and time > 0]
    if not served:
        return {}
    return {
        f"latency.ttft_s.{name}": float(np.quantile(served, share))
        for name, share in _QUANTILES.items()
    }


def _load(fields: Fields, completed: int | None) -> tuple[int | None, float | None]:
    """Return users or rate: an infinite rate is a closed loop, of all requests without a limit."""
    asked = fields.values.get("request_rate")
    rate = inf if asked in (None, "inf", inf) else fields.number("request_rate")
    if rate != inf:
        return None, rate
    limit = fields.whole("max_concurrency")
    return (completed if limit is None else limit), None


def _mean(fields: Fields, name: str, completed: int | None) -> float | None:
    total = fields.optional(name)
    return None if total is None or not completed else total / completed
