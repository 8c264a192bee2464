"""Speed and memory of the engine: requests simulated per second of wall time on one core.

The load of the target: 5,000 requests of 1,000/200 tokens at 8/s through 1 prefill + 1 decode
instance of Kimi K2.6; then 100,000 of them for memory, and the Mooncake trace.
"""

from __future__ import annotations

import resource
import statistics
import time

from tonnage import api
from tonnage.scenarios.load import load_scenario, parse_scenario
from tonnage.scenarios.schema import Scenario

RUNS = 7


def poisson(requests: int) -> Scenario:
    """Return the target's scenario with so many requests."""
    return parse_scenario(
        {
            "name": "engine-benchmark",
            "traffic": {
                "kind": "poisson",
                "rate_per_s": 8,
                "input_tokens": 1000,
                "output_tokens": 200,
                "requests": requests,
            },
            "pools": {"prefill": {"kv": "bf16"}, "decode": {"kv": "fp8_e4m3"}},
        }
    )


def report(name: str, scenario: Scenario, runs: int) -> None:
    """Time `api.simulate` several times and print the median and the best."""
    rates = []
    for _ in range(runs):
        begin_s = time.perf_counter()
        result = api.simulate(scenario)
        elapsed_s = time.perf_counter() - begin_s
        rates.append(len(result.points[0].records) / elapsed_s)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(
        f"{name:<28} median {statistics.median(rates):>8,.0f}/s  best {max(rates):>8,.0f}/s  "
        f"of {runs} runs; peak memory of the process {peak_mb:,.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    report("poisson, 5,000 requests", poisson(5_000), RUNS)
    plain = load_scenario("mooncake-trace", ["cache.gpu=false"])
    report("mooncake-trace, no cache", plain, 3)
    aware = load_scenario("mooncake-trace", ["router.prefill=cache_aware"])
    report("mooncake-trace, cache-aware", aware, 3)
    report("poisson, 100,000 requests", poisson(100_000), 1)
