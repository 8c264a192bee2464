"""Which formats a plan puts where, found by price alone, against what operators published.

Published for 8 x H200: GLM-5.2 with FP8 weights in prefill and INT4 in decode; Kimi K2.6 with FP8
KV in decode where memory binds, BF16 KV slightly faster for one request at a time. No rule of the
search names a format. docs/plan.md has the margins, and where the cost model is weak.
"""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.plan_margins import Margin
from tonnage.plan_runs import planned_load
from tonnage.plan_search import screened_tables
from tonnage.plan_space import Space
from tonnage.planner import PlanReport, plan
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.planning.search import price_order
from tonnage.sim.planning.workload import workload_of

# One layout, so that only the formats and the number of instances are searched.
TP8: dict[str, Any] = {
    "shapes": ["disaggregated"],
    "tp": [8],
    "pp": [1],
    "attention_dp": "never",
    "expert_parallel": "never",
    "chunk_tokens": ["auto"],
    "max_gpus": 256,
    "headroom": 0.0,
    "requests": 120,
    "seeds": 2,
}


def glm_scenario(rate_per_s: float, output_tokens: int = 500, ttft: str = "5s") -> Scenario:
    traffic = {
        "kind": "poisson",
        "rate_per_s": rate_per_s,
        "input_tokens": 3500,
        "output_tokens": output_tokens,
    }
    return _scenario(
        {
            "model": "glm-5.2",
            "traffic": traffic,
            "slo": {"ttft_p95": ttft, "tpot_p95": "50ms"},
            "plan": {**TP8, "weights": ["fp8_block", "int4_g32"], "kv": ["fp8_e4m3"]},
        }
    )


def kimi(users: int, *, compare: bool = False) -> PlanReport:
    """Requests so long that BF16 KV holds 32 of them and FP8 KV 64, as was published."""
    traffic = {
        "kind": "closed",
        "concurrency": users,
        "input_tokens": 20_390,
        "output_tokens": 1000,
        "requests": 4 * users,
    }
    scenario = _scenario(
        {
            "model": "kimi-k2.6",
            "engine": {"mem_fraction": 0.848},
            "traffic": traffic,
            "slo": {"ttft_p95": "60s", "tpot_p95": "60ms"},
            "plan": TP8,
        }
    )
    return plan(scenario, workers=1, compare=compare)


def _scenario(data: dict[str, Any]) -> Scenario:
    common = {"name": "placement", "gpu": "h200-sxm", "price": {"gpu_hour_usd": 3.5}}
    return parse_scenario({**common, **data})


def margin(report: PlanReport, role: str, what: str) -> Margin:
    (found,) = [one for one in report.margins if (one.role, one.what) == (role, what)]
    return found


def formats(report: PlanReport, what: str) -> dict[str, str]:
    return {pool.role: getattr(pool, what) for pool in report.best.pools}


def test_glm_under_load_computes_prompts_in_fp8_and_tokens_from_int4() -> None:
    # Short answers and a patient objective: few runs are simulated.
    report = plan(glm_scenario(20.0, 200, "15s"), workers=1)
    assert formats(report, "weights") == {"prefill": "fp8_block", "decode": "int4_g32"}
    for role in ("prefill", "decode"):
        found = margin(report, role, "weights")
        assert found.usd_per_hour is not None
        assert found.usd_per_hour >= 28.0  # one more instance of eight GPUs at least


@pytest.mark.parametrize("rate_per_s", [2.0, 8.0, 12.0, 18.0, 24.0, 40.0])
def test_the_same_formats_are_the_cheapest_at_every_load(rate_per_s: float) -> None:
    """By the screening. With few instances whole ones decide, and other pairs cost the same."""
    usd = cheapest(glm_scenario(rate_per_s))
    best = usd.pop(("fp8_block", "int4_g32"))
    assert best <= min(usd.values())
    if rate_per_s >= 18:
        assert best < min(usd.values())


def cheapest(scenario: Scenario) -> dict[tuple[str, ...], float]:
    """Return the price of the cheapest screened fleet by the weights of its pools."""
    load = planned_load(scenario, scenario.plan.requests)
    workload = workload_of(load.traffic, load.point, scenario.seed)
    tables = screened_tables(Space(scenario, workload), scenario, lambda _text, _share: None)
    found: dict[tuple[str, ...], float] = {}
    for index, row in price_order([table.screened for table in tables]):
        table = tables[index]
        if table.screened.worst[row] <= 1.0:
            weights = tuple(config.weights for config, _ in table.fleet(row).pools)
            found.setdefault(weights, table.usd_per_hour(row))
    return found


def test_kimi_at_the_ceiling_decodes_from_fp8_kv() -> None:
    report = kimi(64)
    assert formats(report, "kv")["decode"] == "fp8_e4m3"
    found = margin(report, "decode", "kv")
    assert found.usd_per_hour is not None
    assert found.usd_per_hour >= 28.0
    assert _can_be_started(report)


def test_kimi_alone_decodes_from_bf16_kv() -> None:
    """The fleet is the smallest either way; it is what tokens cost that differs."""
    report = kimi(1, compare=True)
    assert formats(report, "kv") == {"prefill": "bf16", "decode": "bf16"}
    found = margin(report, "decode", "kv")
    assert found.usd_per_hour == pytest.approx(0.0)
    more = found.usd_per_million_output_tokens
    assert more is not None
    assert found.tie is False
    share = more.value / report.best.figures.usd_per_million_output_tokens.value
    assert 0.01 < share < 0.08  # published: 137 against 125 tokens/s, 9.6 %


def test_few_requests_make_a_tie_and_it_is_called_one() -> None:
    """One instance of each pool does, in either format, and tokens cost what the GPUs cost."""
    report = plan(glm_scenario(0.5, 200), workers=1, compare=True)
    assert {one.tie for one in report.margins} == {True}


def _can_be_started(report: PlanReport) -> bool:
    """Mixed KV is not launchable; a fleet with one KV format stands beside it."""
    assert report.launchable is not None
    kv = formats(report, "kv")
    assert report.best.launchable is (len(set(kv.values())) == 1)
    gap = report.price_gap_usd_per_hour
    assert gap is not None
    assert gap >= 0.0
    return report.launchable.launchable and len({pool.kv for pool in report.launchable.pools}) == 1
