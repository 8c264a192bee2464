"""Sessions with and without a key that binds them to the instance that holds their prefix."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage import api
from tonnage.scenarios.load import load_scenario, load_variants, parse_scenario


def sessions(instances: int, affinity: str, **traffic: Any) -> dict[str, Any]:
    """Return agents on small instances, eight sessions on each of them."""
    users = 8 * instances
    session = {
        "count": users,
        "turns": 20,
        "shared_prefix_tokens": 2000,
        "first_input_tokens": 4000,
        "new_input_tokens": 1000,
        "output_tokens": 20,
        "think_time": {"kind": "lognormal", "median": "10s", "p95": "60s"},
        "compact_at_tokens": None,
    }
    return {
        "model": "qwen3-8b",
        "gpu": "h100-sxm",
        "engine": {"mem_fraction": 0.35},
        "traffic": {"kind": "sessions", "concurrency": users, "session": session, **traffic},
        "pools": {"serve": {"tp": 1, "instances": instances}},
        "router": {"policy": "least_requests", "affinity": affinity},
        "cache": {"gpu": True},
    }


def outcome(instances: int, affinity: str) -> dict[str, Any]:
    """Return the figures of the only point."""
    report = api.simulate(parse_scenario(sessions(instances, affinity)))
    return dict(report.points[0].figures)


def hit_rate(instances: int, affinity: str) -> float:
    return float(outcome(instances, affinity)["cache"]["input_token_hit_rate"])


def test_with_one_instance_a_key_changes_nothing() -> None:
    assert outcome(1, "none") == outcome(1, "session")


@pytest.mark.parametrize("instances", [2, 4])
def test_a_key_raises_the_hit_rate_and_lowers_the_ttft(instances: int) -> None:
    without, bound = outcome(instances, "none"), outcome(instances, "session")
    rates = [one["cache"]["input_token_hit_rate"] for one in (without, bound)]
    assert rates[1] > rates[0] + 0.1
    assert bound["latency"]["ttft_s"]["mean"] < without["latency"]["ttft_s"]["mean"]


def test_with_a_key_the_number_of_instances_hardly_matters() -> None:
    """At the same load per instance; without one, each instance sees less of every session."""
    bound = [hit_rate(instances, "session") for instances in (1, 2, 4)]
    without = [hit_rate(instances, "none") for instances in (1, 2, 4)]
    assert max(bound) - min(bound) < 0.1
    assert without == sorted(without, reverse=True)
    assert without[0] - without[-1] > 0.2


# --- the shipped scenario -----------------------------------------------------------------------


def test_the_shipped_sessions_are_those_of_the_trace() -> None:
    ours, agents = load_scenario("session-affinity"), load_scenario("kimi-agents")
    assert ours.traffic.session == agents.traffic.session
    assert ours.pools == agents.pools
    assert ours.traffic.concurrency[0] in agents.traffic.concurrency
    assert ours.cache == agents.cache
    variants = load_variants("session-affinity")
    bound = {name for name, one in variants.items() if one.router.affinity == "session"}
    assert bound == {"session affinity"}
    assert set(variants) == {"no affinity", "at random", *bound}


def test_the_shipped_scenario_hits_more_with_affinity() -> None:
    """Some of its sessions, at a quarter of its load; docs/caches.md has the whole."""
    sets = ["traffic.concurrency=16", "traffic.session.count=16"]
    variants = load_variants("session-affinity", sets)
    points = {name: api.simulate(one).points[0].figures for name, one in variants.items()}
    bound = points.pop("session affinity")
    for without in points.values():
        assert bound["requests"] == without["requests"]
        for name, sign in (("cache.input_token_hit_rate", 1), ("latency.ttft_s.mean", -1)):
            assert sign * figure(bound, name) > sign * figure(without, name)


def figure(point: dict[str, Any], dotted: str) -> float:
    """Return a figure of a point that is there."""
    value: Any = point
    for part in dotted.split("."):
        value = value[part]
    return float(value)
