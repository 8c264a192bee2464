"""Prefill beside decode: what splitting the pools does to the time between tokens.

Published for the same number of GPUs: 100 ms at the 90th percentile together, 20 to 30 ms apart.
The load is the scenario's highest, fixed before anything was run; at a third of the prefill pool's
capacity the 90th percentile hardly differs, only the 99th does.
"""

from __future__ import annotations

from functools import cache

import pytest

from tonnage import api
from tonnage.scenarios.load import load_variants


@cache
def gaps_s(variant: str, rate_per_s: int) -> dict[str, float]:
    sets = [f"traffic.rate_per_s={rate_per_s}"]
    scenario = load_variants("colocated-vs-disaggregated", sets)[variant]
    latency = api.simulate(scenario).to_dict()["points"][0]["latency"]
    spread: dict[str, float] = latency["itl_s"]
    return spread


def test_splitting_lowers_the_90th_percentile_several_times_at_the_stated_load() -> None:
    together, apart = gaps_s("colocated", 24), gaps_s("disaggregated", 24)
    assert together["p90"] > 3 * apart["p90"]
    assert apart["p90"] < 0.030


@pytest.mark.parametrize("rate_per_s", [12, 24])
def test_the_99th_percentile_is_a_prefill_step_together_and_a_decode_step_apart(
    rate_per_s: int,
) -> None:
    together, apart = gaps_s("colocated", rate_per_s), gaps_s("disaggregated", rate_per_s)
    assert together["p99"] > 5 * apart["p99"]


def test_a_light_load_hardly_differs_at_the_90th_percentile() -> None:
    together, apart = gaps_s("colocated", 12), gaps_s("disaggregated", 12)
    assert together["p90"] == pytest.approx(apart["p90"], rel=0.35)
