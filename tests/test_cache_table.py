"""What is printed of a prefix cache, and that it comes from a run of a scenario."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tonnage import api
from tonnage.cache_table import print_caches
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.domain import BadInputError
from tonnage.tables import print_simulation

GIB = 2.0**30
SPREAD = {"mean": 0.5, "p50": 0.4, "p95": 1.2}
CACHE: dict[str, Any] = {
    "input_token_hit_rate": 0.813,
    "by_tier": {
        "gpu": {"hit_tokens": 615, "input_token_hit_rate": 0.615},
        "nvme": {
            "hit_tokens": 198,
            "input_token_hit_rate": 0.198,
            "read_bytes": 203 * GIB,
            "written_bytes": 167 * GIB,
            "loads": 164,
            "loads_slower_than_recompute": 41,
            "crossover_tokens": 12_345.6,
        },
    },
    "ttft_s_by_cached_tokens": {
        "0": {"requests": 2, **SPREAD},
        "131072+": {"requests": 1394, **SPREAD, "p95": None},
    },
}


def printed(*caches: dict[str, Any] | None) -> str:
    """Return what is printed of points with these caches, without spaces that only align."""
    stream = io.StringIO()
    console = Console(file=stream, width=200, markup=False, highlight=False)
    named = [
        ((f"{n} per s",), {} if one is None else {"cache": one}) for n, one in enumerate(caches)
    ]
    print_caches(console, ["load"], named)
    return "\n".join("  ".join(line.split()) for line in stream.getvalue().splitlines())


def without(tier: str, **changes: Any) -> dict[str, Any]:
    """Return the cache without a tier, the other one changed."""
    tiers = {name: {**found, **changes} for name, found in CACHE["by_tier"].items() if name != tier}
    return {**CACHE, "by_tier": tiers}


def test_every_tier_shows_hits_bytes_and_slow_loads() -> None:
    lines = printed(CACHE).splitlines()
    assert "0  per  s  all  81.3%" in lines
    assert "0  per  s  gpu  61.5%" in lines
    assert "0  per  s  nvme  19.8%  203.0  GiB  167.0  GiB  164  41  (25%)" in lines


def test_a_tier_that_is_slower_than_computing_is_pointed_out() -> None:
    slow = "Loading from nvme took longer than computing"
    text = " ".join(printed(CACHE).split())
    assert slow in text
    assert "it is faster from 12,346 tokens on" in text
    assert "at no length" in " ".join(printed(without("gpu", crossover_tokens=None)).split())
    assert slow not in " ".join(printed(without("gpu", loads_slower_than_recompute=0)).split())


def test_ttft_is_shown_by_length_of_hit() -> None:
    lines = printed(CACHE).splitlines()
    assert "0  per  s  0  2  500  ms  400  ms  1.2  s" in lines
    assert "0  per  s  131072+  1,394  500  ms  400  ms  -" in lines


def test_a_cache_on_the_gpu_alone_has_no_tiers_to_show() -> None:
    text = printed(without("nvme"))
    assert "all  81.3%" in text
    assert "written" not in text


def test_nothing_is_said_of_runs_without_a_cache() -> None:
    assert printed(None) == ""
    assert printed(None, CACHE).count("all") == 1


# --- from a scenario ----------------------------------------------------------------------------


def agents(**changes: Any) -> dict[str, Any]:
    """Return a few sessions on two small instances, as a mapping."""
    lengths = {"shared_prefix_tokens": 2000, "first_input_tokens": 3000, "new_input_tokens": 500}
    session = {**lengths, "count": 6, "turns": 5, "output_tokens": 50, "think_time": "5s"}
    return {
        "model": "qwen3-8b",
        "gpu": "h100-sxm",
        "traffic": {"kind": "sessions", "concurrency": 3, "session": session},
        "pools": {"prefill": {"tp": 1, "instances": 2}, "decode": {"tp": 1}},
        "price": {"gpu_hour_usd": 2.0, "split": "pools", "cached_input": 0.25},
        "cache": {"gpu": True},
        **changes,
    }


def point(report: dict[str, Any]) -> dict[str, Any]:
    return dict(report["points"][0])


def test_tokens_pay_for_the_fleet_and_cached_ones_less() -> None:
    one = point(api.simulate(parse_scenario(agents())).to_dict())
    rates, costs = one["throughput"], one["cost"]
    cached = rates["cached_input_tokens_per_s"]
    assert cached == pytest.approx(
        one["cache"]["input_token_hit_rate"] * rates["input_tokens_per_s"]
    )
    input_usd = costs["usd_per_million_input_tokens"]
    assert costs["usd_per_million_cached_input_tokens"] == pytest.approx(input_usd / 4)
    per_s = costs["usd_per_million_output_tokens"] * rates["output_tokens_per_s"]
    per_s += input_usd * (rates["input_tokens_per_s"] - cached) + input_usd / 4 * cached
    assert per_s / 1e6 * 3600 == pytest.approx(costs["usd_per_hour"])


def test_a_report_shows_the_cache_and_says_who_pays() -> None:
    report = api.simulate(parse_scenario(agents())).to_dict()
    stream = io.StringIO()
    print_simulation(Console(file=stream, width=250, markup=False, highlight=False), {"": report})
    text = stream.getvalue()
    for part in (
        "input tok/s",
        "cached input tok/s",
        "USD / M input",
        "USD / M cached",
        "hit rate",
    ):
        assert part in text
    assert "a cached one at 0.25 of one that is computed (given)" in text
    assert "free KV pages keep prefixes, LRU" in text


def test_without_a_cache_a_report_says_what_is_computed_again() -> None:
    scenario = parse_scenario(agents(cache={}, price={"gpu_hour_usd": 2.0}))
    report = api.memory(scenario).to_dict()
    lines = report["provenance"]["assumptions"]
    assert any(line.startswith("no prefix cache: what prompts repeat") for line in lines)
    assert any("charged to output tokens; price.split: pools" in line for line in lines)


def test_one_pool_for_both_phases_has_no_split() -> None:
    with pytest.raises(BadInputError, match=r"price\.split: no pool computes prompts alone"):
        parse_scenario(agents(pools={"serve": {"tp": 1}}))
