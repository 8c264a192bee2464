"""Results in the shapes of other tools, all of one made-up run, to see that they read alike.

32 requests of 1,000 prompt and 101 output tokens by 4 users; TTFT 200 ms, then 100 gaps of 10 ms:
1.2 s each, 8 waves in 9.6 s. Shapes after the tools' documentation and sources (named in the
readers); the figures are ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

USERS, REQUESTS, PROMPT, ANSWER = 4, 32, 1000, 101
TTFT_S, TPOT_S, E2E_S, DURATION_S = 0.2, 0.01, 1.2, 9.6
OUTPUT_PER_S = REQUESTS * ANSWER / DURATION_S
TOTAL_PER_S = REQUESTS * (PROMPT + ANSWER) / DURATION_S


def client_aggregates() -> dict[str, Any]:
    """Return what the clients of vLLM and SGLang have in common."""
    latencies = {"ttft": TTFT_S, "tpot": TPOT_S, "itl": TPOT_S}
    return {
        "request_rate": "inf",
        "max_concurrency": USERS,
        "duration": DURATION_S,
        "completed": REQUESTS,
        "total_input_tokens": REQUESTS * PROMPT,
        "total_output_tokens": REQUESTS * ANSWER,
        "request_throughput": REQUESTS / DURATION_S,
        "output_throughput": OUTPUT_PER_S,
        **{
            f"{statistic}_{name}_ms": 1000 * value
            for name, value in latencies.items()
            for statistic in ("mean", "median", "p99")
        },
    }


def vllm_serve() -> dict[str, Any]:
    """Return the object of `vllm bench serve --percentile-metrics ttft,tpot,itl,e2el`."""
    return client_aggregates() | {
        "date": "20261130-100000",
        "endpoint_type": "vllm",
        "model_id": "some/model",
        "num_prompts": REQUESTS,
        "burstiness": 1.0,
        "failed": 0,
        "total_token_throughput": TOTAL_PER_S,
        "mean_e2el_ms": 1000 * E2E_S,
        "median_e2el_ms": 1000 * E2E_S,
        "ttfts": [TTFT_S] * REQUESTS,
    }


def sglang_serving() -> dict[str, Any]:
    """Return one line of `python -m sglang.bench_serving`."""
    return client_aggregates() | {
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),
        "input_throughput": REQUESTS * PROMPT / DURATION_S,
        "mean_e2e_latency_ms": 1000 * E2E_S,
        "median_e2e_latency_ms": 1000 * E2E_S,
        "concurrency": 4.0,
    }


def guidellm() -> dict[str, Any]:
    """Return a report of `guidellm benchmark` with one load."""

    def of(value: float) -> dict[str, Any]:
        percentiles = dict.fromkeys(("p50", "p90", "p95", "p99"), value)
        return {"successful": {"mean": value, "median": value, "percentiles": percentiles}}

    return {
        "metadata": {"version": 2, "guidellm_version": "0.5.3"},
        "benchmarks": [
            {
                "type_": "generative_benchmark",
                "config": {"strategy": {"type_": "concurrent", "streams": USERS}},
                "metrics": {
                    "request_totals": {"successful": REQUESTS, "errored": 0, "incomplete": 0},
                    "requests_per_second": of(REQUESTS / DURATION_S),
                    "request_latency": of(E2E_S),
                    "time_to_first_token_ms": of(1000 * TTFT_S),
                    "time_per_output_token_ms": of(1000 * E2E_S / ANSWER),
                    "inter_token_latency_ms": of(1000 * TPOT_S),
                    "prompt_token_count": of(PROMPT),
                    "output_token_count": of(ANSWER),
                    "output_tokens_per_second": of(OUTPUT_PER_S),
                    "tokens_per_second": of(TOTAL_PER_S),
                },
            }
        ],
    }


def aiperf() -> dict[str, Any]:
    """Return `profile_export_aiperf.json`."""

    def record(unit: str, value: float) -> dict[str, Any]:
        statistics = dict.fromkeys(("avg", "min", "max", "p50", "p90", "p95", "p99"), value)
        return {"unit": unit, **statistics, "std": 0.0, "count": REQUESTS}

    return {
        "schema_version": "1.4",
        "input_config": {"phases": {"profiling": {"concurrency": USERS}}},
        "request_latency": record("ms", 1000 * E2E_S),
        "time_to_first_token": record("ms", 1000 * TTFT_S),
        "inter_token_latency": record("us", 1e6 * TPOT_S),
        "input_sequence_length": record("tokens", PROMPT),
        "output_sequence_length": record("tokens", ANSWER),
        "request_count": {"unit": "requests", "avg": REQUESTS},
        "request_throughput": {"unit": "requests/sec", "avg": REQUESTS / DURATION_S},
        "output_token_throughput": {"unit": "tokens/sec", "avg": OUTPUT_PER_S},
        "total_token_throughput": {"unit": "tokens/sec", "avg": TOTAL_PER_S},
    }


def inference_perf() -> dict[str, Any]:
    """Return `stage_0_lifecycle_metrics.json`."""

    def of(value: float) -> dict[str, float]:
        return dict.fromkeys(("mean", "min", "max", "median", "p90", "p95", "p99"), value)

    return {
        "load_summary": {"count": REQUESTS, "concurrency": USERS, "requested_rate": 50.0},
        "successes": {
            "count": REQUESTS,
            "latency": {
                "request_latency": of(E2E_S),
                "normalized_time_per_output_token": of(E2E_S / ANSWER),
                "time_per_output_token": of(TPOT_S),
                "time_to_first_token": of(TTFT_S),
                "inter_token_latency": of(TPOT_S),
            },
            "throughput": {
                "input_tokens_per_sec": REQUESTS * PROMPT / DURATION_S,
                "output_tokens_per_sec": OUTPUT_PER_S,
                "total_tokens_per_sec": TOTAL_PER_S,
                "requests_per_sec": REQUESTS / DURATION_S,
            },
            "prompt_len": of(PROMPT),
            "output_len": of(ANSWER),
        },
        "failures": {"count": 0},
    }


TOOLS = {
    "vllm bench serve": vllm_serve,
    "sglang.bench_serving": sglang_serving,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "inference-perf": inference_perf,
}


def write(folder: Path, data: dict[str, Any], name: str = "result.json") -> Path:
    """Write an object as the tools do, `Infinity` included."""
    path = folder / name
    path.write_text(json.dumps(data), encoding="utf-8")
    return path
